"""From a run file, presets and overrides to one `RunConfig`: nothing is guessed, nothing is ignored.

A run has values from published practice (`practice`), by its objective and its adapter, unless it says others; and some
of a run preset's values say nothing of a run that is given something else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from argosy.config.data import DataConfig, row_kind
from argosy.config.layers import (
    OF_ANY_MODEL,
    PRESET_PATH,
    WEIGHTS_PATH,
    Layer,
    Setting,
    Source,
    file_layer,
    of_weights,
    override_layer,
    preset_layer,
    preset_names,
    preset_path,
    run_layer,
    table_layer,
)
from argosy.config.lines import read_toml
from argosy.config.model import ModelConfig
from argosy.config.problems import ELSEWHERE, KeyPlace, Problem, problem_of, shown, suggestion
from argosy.config.schema import RunConfig
from argosy.config.section import Key, Section, dotted, key_fields, key_of, nest, sections, value_type
from argosy.errors import UserError, near_names
from argosy.files import expanded

DEFAULT_RUN = "demo"
RUN_FILE = "run.toml"
"""The run file in a run's folder."""
MAX_SEQ_LEN_PATH: Key = ("model", "max_seq_len")
OPTION_MARK = "--"
"""Stands before a key in messages about the command line."""
NOWHERE = "default"
"""The origin of a value that nobody gave."""
MOST_PROBLEMS = 20
"""Most wrong keys and values that one message names: to look for what was meant takes time."""
_NO_DEFAULT = "default_factory_not_called"
"""pydantic's error for a key whose default depends on a key that is itself wrong."""

SectionT = TypeVar("SectionT", bound=Section)


def load(
    source: str | Path | None = None,
    overrides: Mapping[str, object] | None = None,
    *,
    overrides_mark: str = "overrides: ",
    is_settled: bool = False,
) -> RunConfig:
    """Return the resolved run: the model preset, the run file's keys over it, `overrides` over both.

    Without a model preset, the sizes of a model that starts from weights are those of the weights.

    source: a run file (TOML), or the name of a run preset; None is the built-in demo.
    overrides: dotted keys, e.g. {"train.steps": 100, "model.preset": "llama-20m"}; a preset replaces the
        file's whole model.
    overrides_mark: text before an override in an error message.
    is_settled: the file is that of a run's folder, which says all sizes: nothing is read where model.weights leads.

    Paths in a run file are relative to it; in a preset or an override, to the current folder. The result's
    are absolute. Raises: UserError that names every wrong key and value, with file and line.
    """
    preset = run_preset(source)
    path = preset or run_file(str(source))
    folder = Path.cwd() if preset else path.absolute().parent
    file = file_layer(path, path.name if preset else str(path), folder)
    given = override_layer(overrides or {}, overrides_mark)
    return load_layers(of_preset(file, given) if preset else file, given, folder, is_settled)


def load_layers(file: Layer, given: Layer, folder: Path, is_settled: bool = False) -> RunConfig:
    """Return the resolved run of a run file's values and of those `given` over them, as `load` does.

    folder: relative paths begin there. Raises: UserError.
    """
    below = over_model_preset(file, given)
    said = ({} if is_settled else of_weights(below | given)) | below | given
    longest = said[MAX_SEQ_LEN_PATH].value if MAX_SEQ_LEN_PATH in said else ModelConfig().max_seq_len
    usual: dict[Key, object] = {("data", "prepare", "out"): DataConfig().prepare.out} | practice(said, longest)
    return build(RunConfig, run_layer(usual, Source(""), folder) | said, below)


def origin_of(source: str | Path | None, key: str, options: Collection[str] = ()) -> str:
    """Return where `key` of the run of `source` has its value from, in words: an option, a line of a file, or nowhere.

    options: the keys that the command line changes.
    """
    if key in options:
        return f"{OPTION_MARK}{key}"
    preset = run_preset(source)
    path = preset or run_file(str(source))
    layer = file_layer(path, path.name if preset else str(path), path.absolute().parent)
    entry = layer.get(key_of(key))
    return entry.source.place(key_of(key)).text.removesuffix(": ") if entry else NOWHERE


def build(schema: type[SectionT], entries: Layer, below: Mapping[Key, Setting] = MappingProxyType({})) -> SectionT:
    """Build a `schema` from these values. Raises: UserError that names everything that is wrong with them.

    below: values that some of `entries` replace, which hold if these are left out.
    """
    known = {key: entry for key, entry in entries.items() if key in key_fields(schema) or key in sections(schema)}
    unknown = [key for key in entries if key not in known]
    problems = [_unknown_key(key, entries[key], schema) for key in unknown[:MOST_PROBLEMS]]
    more = len(unknown) - len(problems)
    # Strict, so that "100" is no number; as JSON, since strict Python input refuses text for a path. In turn
    # strict JSON input refuses a default that is a Path already, so those are passed as text too.
    values: dict[Key, object] = {
        key: str(f.default) for key, f in key_fields(schema).items() if isinstance(f.default, Path)
    }
    values |= {key: _whole(key, entry.value, schema) for key, entry in known.items()}
    problems += [_too_large(key, entry) for key, entry in known.items() if _is_too_large(entry.value)]
    try:
        config = schema.model_validate_json(json.dumps(nest(values), default=str), strict=True)
    except ValidationError as error:
        errors = [e for e in error.errors(include_url=False) if e["type"] != _NO_DEFAULT]
        replaced = {key: entry.value for key, entry in below.items() if entries[key] is not entry}
        problems += [problem_of(e, schema, lambda key: _place(key, known), replaced) for e in errors[:MOST_PROBLEMS]]
        more += len(errors[MOST_PROBLEMS:])
    except OverflowError:  # a default that follows from a number that is too large
        if not problems:
            raise
    if problems:
        problems.sort(key=lambda p: (p.is_rule, p.place.line))
        more += len(problems[MOST_PROBLEMS:])
        lines = [*map(str, problems[:MOST_PROBLEMS]), *([f"... and {more} more problems"] if more else [])]
        raise UserError("\n".join(lines))
    return config


def build_file(schema: type[SectionT], path: Path, settle: Callable[[dict[str, Any]], None] | None = None) -> SectionT:
    """Read a file that has the keys of `schema`; `settle` may change what it says before that is checked.

    Raises: UserError that names every wrong key, with its line.
    """
    table, lines = read_toml(path)
    if not table:
        raise UserError(f"{path}: has no keys. Give it what it needs of {', '.join(schema.model_fields)}.")
    if settle is not None:
        settle(table)
    return build(schema, table_layer(table, schema, Source(str(path), lines)))


def _unknown_key(key: Key, entry: Setting, schema: type[Section]) -> Problem:
    mark = OPTION_MARK if entry.source.name == OPTION_MARK else ""
    where = suggestion(key, key_fields(schema), mark, ELSEWHERE if schema is RunConfig else {})
    text = f"{dotted(key)} = {shown(entry.value)}: unknown key; {where}"
    return Problem(entry.source.place(key), text)


def _is_too_large(value: object) -> bool:
    if isinstance(value, list | dict):
        return any(map(_is_too_large, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and abs(value) >= 2**63


def _too_large(key: Key, entry: Setting) -> Problem:
    text = f"{dotted(key)} = {shown(entry.value)}: TOML's whole numbers have 64 bits, and this is larger. Lower it."
    return Problem(entry.source.place(key), text)


def _whole(key: Key, value: object, schema: type[Section]) -> object:
    """24e6 is a whole number, though TOML calls it a float."""
    wants_int = key in key_fields(schema) and value_type(key_fields(schema)[key]) is int
    return int(value) if wants_int and isinstance(value, float) and value.is_integer() else value


def _place(key: Key, entries: Layer) -> KeyPlace:
    """Return where `key` was written; if nowhere, the table in which it might have been, or the only file there is."""
    for depth in range(len(key), 0, -1):
        if entry := entries.get(key[:depth]):
            return entry.source.place(key)
        for near, entry in entries.items():
            if near[:depth] == key[:depth] and entry.source.lines:
                return entry.source.place(key)
    files = {entry.source.name: entry.source for entry in entries.values() if entry.source.lines}
    return next(iter(files.values())).place(()) if len(files) == 1 else KeyPlace()


def over_model_preset(file: Layer, given: Layer) -> Layer:
    """`file` over the model preset that it or `given` names.

    A preset named in `given` is another model. It replaces all that the file says of its own model except
    `OF_ANY_MODEL`: sizes of two models, mixed, would make a third which nobody asked for.
    Raises: UserError for an unknown preset.
    """
    new = _model_preset(file | given)
    if new and PRESET_PATH in given:
        file = {key: entry for key, entry in file.items() if key[0] != "model" or key in OF_ANY_MODEL}
    return new | file


def _model_preset(layer: Layer) -> Layer:
    entry = layer.get(PRESET_PATH)
    if entry is None or not isinstance(entry.value, str):
        return {}
    try:
        return preset_layer(preset_path("models", entry.value))
    except UserError as error:
        place = entry.source.place(PRESET_PATH)
        raise UserError(f'{place.text}model.preset = "{entry.value}": {error}') from None


def run_preset(source: str | Path | None) -> Path | None:
    """The file of the run preset that `source` names, or None if it names none."""
    name = DEFAULT_RUN if source is None else str(source)
    return preset_path("runs", name) if name in preset_names("runs") else None


def run_file(source: str) -> Path:
    """The run file at `source`. Raises: UserError if there is none, with the names that are near."""
    path = expanded(source)
    if path.is_file():
        return path
    if path.is_dir():
        own = path / RUN_FILE
        inside = str(own) if own.is_file() else " or ".join(str(p) for p in sorted(path.glob("*.toml"))[:3])
        raise UserError(f"{path}: a folder, not a run file.{f' Try {inside}.' if inside else ''}")
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}.")
    if path.is_symlink():
        raise UserError(f"{path}: a link to {path.readlink()}, which is not there. Name the run file itself.")
    files = (p.name for p in path.parent.glob("*.toml") if p.name != "pyproject.toml")
    names = [*files, *preset_names("runs")]
    raise UserError(f"{path}: no such run file or preset; {near_names(path.name, sorted(names))}")


NOT_SIZES = {
    *("preset", "weights", "vocab_size", "init_std", "norm_eps", "mup"),
    *("max_seq_len", "rope_theta", "rope_scaling"),
}
"""Keys that make no other model of a preset."""


def model_name(model: ModelConfig, otherwise: str = "") -> str:
    """Return the preset's name, with a remark if its sizes were changed; without one, `otherwise` or the family."""
    if model.preset is None:
        return otherwise or model.family
    preset = build(RunConfig, preset_layer(preset_path("models", model.preset))).model
    as_it_is = preset.model_dump(exclude=NOT_SIZES) == model.model_dump(exclude=NOT_SIZES)
    return model.preset if as_it_is else f"{model.preset} with other sizes"


OBJECTIVE, LORA_RANK = key_of("train.objective"), key_of("lora.rank")

ROW_TOKENS = 1024
"""Longest row of conversations, as TRL's trainers have it (max_length); a model with a shorter context has shorter
rows."""


class ObjectiveDefaults(NamedTuple):
    """The usual settings of an objective."""

    lr: float
    """Learning rate when all weights are trained."""
    warmup: float
    """Share of the steps."""
    epochs: float


OF_OBJECTIVE: Mapping[str, ObjectiveDefaults] = {
    "sft": ObjectiveDefaults(2e-5, 0.03, 3),
    "dpo": ObjectiveDefaults(5e-7, 0.1, 1),
    "ipo": ObjectiveDefaults(5e-7, 0.1, 1),
    "simpo": ObjectiveDefaults(8e-7, 0.1, 1),
    "orpo": ObjectiveDefaults(8e-6, 0.1, 1),
    "kto": ObjectiveDefaults(5e-7, 0.1, 1),
    "reward": ObjectiveDefaults(1e-5, 0.03, 1),
}
"""sft: Taori et al. 2023 (Alpaca), whose rate is that of Tunstall et al. 2023 (Zephyr) too. dpo: Tunstall et al. 2023
and Lambert et al. 2024 (Tulu 3); ipo as dpo. simpo: Meng et al. 2024, whose rates are 3e-7 to 1e-6. orpo: Hong et al.
2024. kto: TRL's script. reward: Touvron et al. 2023 (Llama 2). All decay by a cosine or linearly to about nothing, with
Adam's usual beta2 and no weight decay."""
TUNED: Mapping[Key, object] = {key_of("optimizer.beta2"): 0.999, key_of("optimizer.weight_decay"): 0.0}
ADAPTER_LR = 2e-4
"""Hu et al. 2021 (appendix D, GPT-3) and Dettmers et al. 2023 ("QLoRA", table 9), who also give beta2 and no weight
decay: of text and of conversations."""
ADAPTER_FACTOR = 10
"""The best rate of an adapter over that of all weights, whatever the rank (Schulman et al. 2025, "LoRA Without
Regret")."""

STANDS_FOR: Mapping[Key, tuple[Key, ...]] = {
    key_of("train.epochs"): (key_of("train.steps"), key_of("train.minutes")),
    key_of("schedule.warmup_fraction"): (key_of("schedule.warmup_steps"), key_of("train.minutes")),
}
"""Key -> those that say the same in another way, or cannot go with it: practice leaves it out beside one of these."""

SAYS_NOTHING: Mapping[Key, tuple[str, ...]] = {
    WEIGHTS_PATH: ("model", "data.prepare.vocab_size"),
    LORA_RANK: ("optimizer",),
    OBJECTIVE: (
        *("name", "data.seq_len", "data.prepare.out", "data.prepare.vocab_size", "data.prepare.max_text_bytes"),
        *("train", "optimizer", "schedule", "evaluate", "launch.processes"),
    ),
    key_of("data.prepare.input"): ("data.prepare.max_text_bytes",),
    key_of("data.sources"): ("data.prepare",),
}
"""A key that a run is given -> the keys and tables of a run preset that are nobody's choice then: they are of its own
model, of training all weights, or of its text."""


def of_preset(preset: Layer, given: Layer) -> Layer:
    """Return the values of a run preset that still say something beside those that are `given`."""
    prefixes = [key_of(name) for key, names in SAYS_NOTHING.items() if _is_asked(given, key) for name in names]
    return {key: entry for key, entry in preset.items() if not any(key[: len(prefix)] == prefix for prefix in prefixes)}


def practice(asked: Layer, longest: object) -> dict[Key, object]:
    """Return the values that a run has which says nothing of them.

    asked: what it says. longest: the model's longest sequence in tokens, if it is known.
    """
    objective, has_adapter = _value(asked, OBJECTIVE), bool(_value(asked, LORA_RANK))
    usual = OF_OBJECTIVE.get(objective) if isinstance(objective, str) else None
    found: dict[Key, object] = dict(TUNED) if usual or has_adapter else {}
    if has_adapter:
        found[key_of("optimizer.lr")] = ADAPTER_LR if usual is None else usual.lr * ADAPTER_FACTOR
    if usual is None:
        return found
    found |= {
        key_of("name"): objective,
        key_of("data.seq_len"): min(ROW_TOKENS, longest) if isinstance(longest, int) else ROW_TOKENS,
        key_of("data.prepare.out"): f"data/{row_kind(str(objective))}",
        key_of("train.epochs"): usual.epochs,
        key_of("schedule.kind"): "cosine",
        key_of("schedule.warmup_fraction"): usual.warmup,
        key_of("schedule.final_ratio"): 0.0,
    }
    if objective == "reward":
        found[key_of("model.score")] = True
    if not has_adapter:
        found[key_of("optimizer.lr")] = usual.lr
    others = {key: [other for other in rest if _value(asked, other)] for key, rest in STANDS_FOR.items()}
    return {key: value for key, value in found.items() if not others.get(key)}


def _value(layer: Layer, key: Key) -> object:
    return layer[key].value if key in layer else None


def _is_asked(given: Layer, key: Key) -> bool:
    return _value(given, key) not in (None, 0, "pretrain")
