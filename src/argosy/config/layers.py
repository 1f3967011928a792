"""The sources of a run's values: run file, presets, overrides and the run whose weights it starts from, a layer each.

A layer is values with the place where they were written."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from argosy.config.lines import read_toml
from argosy.config.problems import KeyPlace
from argosy.config.schema import RunConfig
from argosy.config.section import Key, Section, dotted, flatten, key_fields, key_of, value_type
from argosy.errors import ArgosyWarning, UserError, near_names
from argosy.files import expanded

PRESETS_FOLDER = Path(__file__).parent / "presets"

Kind = Literal["models", "runs", "devices", "clusters"]


def preset_names(kind: Kind) -> list[str]:
    return sorted(path.stem for path in (PRESETS_FOLDER / kind).glob("*.toml"))


def preset_path(kind: Kind, name: str) -> Path:
    """The file of a preset. Raises: UserError if there is none of that name."""
    names = preset_names(kind)
    if name not in names:
        raise UserError(f"no {kind[:-1]} preset is called {name!r}; {near_names(name, names)}")
    return PRESETS_FOLDER / kind / f"{name}.toml"


RENAMED: Mapping[Key, Key] = {
    ("resilience", "examine_s"): ("resilience", "node_check_s"),
    ("resilience", "beat_timeout_s"): ("resilience", "heartbeat_timeout_s"),
    ("resilience", "recompute_every_steps"): ("resilience", "replay_check_every_steps"),
    ("resilience", "memory_every_steps"): ("resilience", "memory_checkpoint_every_steps"),
    ("resilience", "move_for_speed"): ("resilience", "migrate"),
}
"""Old key -> new key, since 0.1; to be removed with 0.3."""
REMOVED: Mapping[Key, tuple[object, str]] = {
    ("sync", "momentum_every"): (0, "the outer momentum is updated once in as many updates as the run has [[sites]]"),
}
"""Key that is gone -> the value that said what is done now, which older run files have; and what that is."""


def is_removed(key: Key, value: object, place: str) -> bool:
    """Return True if a key is gone, and had no effect. Raises: UserError if it had one."""
    if key not in REMOVED:
        return False
    without_effect, now = REMOVED[key]
    if value != without_effect:
        raise UserError(f"{place}{dotted(key)} = {value}: the key is gone; {now}. Remove it.")
    return True


def new_key(key: Key, place: str, beside: Collection[Key] = ()) -> Key:
    """Return what `key` is called now. Warn with `place`, where it was written, if it was called otherwise before.

    beside: the keys that were written in the same place. Raises: UserError if the new one is among them.
    """
    new = RENAMED.get(key)
    if new is None:
        return key
    if new in beside:
        raise UserError(f"{place}{dotted(key)} is called {dotted(new)} now, and both are given. Remove the old one.")
    # No stack level: the line to change is the user's, which the text names.
    text = f"{place}{dotted(key)} is called {dotted(new)} now; the old name will go."
    warnings.warn(text, ArgosyWarning, stacklevel=1)
    return new


@dataclass(frozen=True)
class Source:
    """The origin of values, as messages name it: a file with the lines of its keys, or a mark before the key ("--")."""

    name: str
    lines: Mapping[Key, int] | None = None

    def place(self, key: Key) -> KeyPlace:
        """Return the place of `key`: its own line, that of its first element, or of the nearest table around it."""
        if self.lines is None:
            return KeyPlace(self.name)
        for depth in range(len(key), 0, -1):
            if line := self.lines.get(key[:depth]) or self.lines.get((*key[:depth], 0)):
                return KeyPlace(f"{self.name}:{line}: ", line)
        return KeyPlace(f"{self.name}: ")


def place_in(path: Path, key: Key) -> str:
    """Return the place of a key in a file, as errors begin with it. Raises: UserError if the file cannot be read."""
    return Source(str(path), read_toml(path)[1]).place(key).text


@dataclass(frozen=True)
class Setting:
    """One value and its origin."""

    value: object
    source: Source


Layer = dict[Key, Setting]


def file_layer(path: Path, name: str, folder: Path) -> Layer:
    """The values of a run file, called `name` in messages; paths start from `folder`. Raises: UserError."""
    table, lines = read_toml(path)
    return run_layer(flatten(table, RunConfig), Source(name, lines), folder)


def preset_layer(path: Path) -> Layer:
    """The values of a model preset, as keys of a run. Raises: UserError."""
    table, lines = read_toml(path)
    source = Source(path.name, {("model", *key): line for key, line in lines.items()})
    return run_layer(flatten({"model": table}, RunConfig), source, Path.cwd())


def table_layer(table: Mapping[str, Any], schema: type[Section], source: Source) -> Layer:
    """The values of a table of any `schema` (a device, a cluster), as they are."""
    return {key: Setting(value, source) for key, value in flatten(table, schema).items()}


def override_layer(overrides: Mapping[str, object], mark: str) -> Layer:
    """The values of {dotted key: value or table}; `mark` stands before them in messages."""
    values: dict[Key, object] = {}
    for name, value in overrides.items():
        key = key_of(name)
        if isinstance(value, Mapping) and key not in key_fields(RunConfig):
            values |= flatten(value, RunConfig, key)
        else:
            values[key] = value
    return run_layer(values, Source(mark), Path.cwd())


def run_layer(values: Mapping[Key, object], source: Source, folder: Path) -> Layer:
    """Return the values of a run under today's keys; paths become absolute, a plan's table becomes its string."""
    there = {key: value for key, value in values.items() if not is_removed(key, value, source.place(key).text)}
    named = {new_key(key, source.place(key).text, there): value for key, value in there.items()}
    return {key: Setting(_settled(key, value, folder), source) for key, value in named.items()}


def _settled(key: Key, value: object, folder: Path) -> object:
    match key, value:
        case ("plan",), dict():
            return _plan_text(value)
        case ("data", "sources"), dict():
            return {_absolute(path, folder): weight for path, weight in value.items()}
        case ("data", "stages"), list() | tuple():
            return [_settled_stage(stage, folder) for stage in value]
        case ((("data", "prepare", "input") | ("extend", "files")), list() | tuple()):
            return [_absolute(path, folder) for path in value]
        case ("data", "prepare", "chat_template"), str() if Path(value).suffix:  # the name of a built-in one has none
            return _absolute(value, folder)
    is_path = key in key_fields(RunConfig) and value_type(key_fields(RunConfig)[key]) is Path
    return _absolute(value, folder) if is_path or (key == ("checkpoint", "remote") and value) else value


def _settled_stage(stage: object, folder: Path) -> object:
    if isinstance(stage, dict) and "sources" in stage:
        return stage | {"sources": _settled(("data", "sources"), stage["sources"], folder)}
    return stage


_SLASHED_URL = re.compile(r"(hf|s3a?|gs|az|adl|azure|abfss?|file):/")
"""A URL that was taken for a path on its way has one slash."""


def _absolute(path: object, folder: Path) -> object:
    """`path` from `folder` on; URLs, builtin:NAME, source:NAME and what is no path at all stay as they are."""
    text = str(path)
    if (
        not isinstance(path, str | Path)
        or "://" in text
        or text.startswith(("builtin:", "source:"))
        or _SLASHED_URL.match(text)
    ):
        return path
    return os.path.normpath(folder / expanded(path))


def _plan_text(table: dict[str, object]) -> object:
    """{auto = true, tp = 2} -> "auto,tp=2"; `argosy.plan` gives the words their meaning."""
    if any(isinstance(value, dict | list) for value in table.values()):
        return table
    words = {key: str(v).lower() if isinstance(v, bool) else str(v) for key, v in table.items()}
    auto = ["auto"] if words.pop("auto", "false") == "true" else []
    return ",".join(auto + [f"{key}={word}" for key, word in words.items()])


WEIGHTS_PATH: Key = ("model", "weights")
PRESET_PATH: Key = ("model", "preset")
OF_ANY_MODEL: tuple[Key, ...] = (WEIGHTS_PATH, ("model", "init_std"), ("model", "score"))
"""Keys of the model that no preset sets, nor weights that it starts from."""


def of_weights(asked: Layer) -> Layer:
    """Return the model's sizes in the run of `model.weights`, or in its Hugging Face folder, if `asked` names weights
    and no preset.

    Raises: UserError if there is neither, and `asked` says nothing of the sizes.
    """
    entry = asked.get(WEIGHTS_PATH)
    if entry is None or not isinstance(entry.value, str | Path) or PRESET_PATH in asked:
        return {}
    folder = Path(entry.value)
    runs = [path for path in (folder / "run.toml", folder.parent.parent / "run.toml") if path.is_file()]
    if runs:
        file = file_layer(runs[0], str(runs[0]), runs[0].parent)
        return {
            key: found for key, found in file.items() if key[0] == "model" and key not in (PRESET_PATH, *OF_ANY_MODEL)
        }
    says_all = all(("model", key) in asked for key in SAYS_ALL)
    if not says_all and (_SLASHED_URL.match(str(entry.value)) or (folder / "config.json").is_file()):
        return _of_model_folder(entry.value, f"{entry.source.place(WEIGHTS_PATH).text}model.weights = ")
    if any(key[0] == "model" and key not in OF_ANY_MODEL for key in asked):
        return {}
    raise UserError(
        f"{entry.source.place(WEIGHTS_PATH).text}model.weights = {folder}: no run.toml and no config.json there says "
        "the model's sizes. Give a run folder, one of its checkpoints, a Hugging Face folder or hf://OWNER/NAME."
    )


SAYS_ALL = ("family", "layers", "width", "heads", "vocab_size")
"""Sizes that are all there in the file of a run that was settled: nothing is asked of a store again."""
MODEL_FOLDERS = "argosy.models.hf"
"""The module that reads config.json of Hugging Face folders. It needs torch, and stands above this room: it is imported
by name, and only for weights that lie in such a folder."""


def _of_model_folder(place: str | Path, named: str) -> Layer:
    """Return the sizes in the config.json of a Hugging Face folder, or of its URL. Raises: UserError."""
    model = import_module(MODEL_FOLDERS).import_config(place, named)
    values = flatten({"model": model.model_dump(mode="json", exclude_unset=True)}, RunConfig)
    source = Source(f"{named}{place}: ")
    return {key: Setting(value, source) for key, value in values.items() if key not in (PRESET_PATH, *OF_ANY_MODEL)}
