"""Messages about wrong keys and values: a sentence that says what is allowed, and ends in what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from argosy.config.section import (
    DURATION,
    Key,
    Section,
    count_of,
    dotted,
    element_of,
    key_fields,
    key_of,
    limits,
    meanings,
    seconds_of,
    sections,
    value_type,
)


class KeyPlace(NamedTuple):
    """The place of a key: `text` stands before the key in a message, `line` orders the messages."""

    text: str = ""
    line: int = 0


class Problem(NamedTuple):
    """One wrong key or value."""

    place: KeyPlace
    text: str
    is_rule: bool = False
    """True for a rule between keys: it may be broken only because of another problem, and is told after those."""

    def __str__(self) -> str:
        return self.place.text + self.text


def problem_of(
    error: ErrorDetails,
    schema: type[Section],
    place: Callable[[Key], KeyPlace],
    replaced: Mapping[Key, object] = MappingProxyType({}),
) -> Problem:
    """The problem that pydantic found in a `schema`; `place` says where a key was written.

    replaced: values that hold in place of the schema's defaults, if what replaces them is left out.
    """
    key: Key = error["loc"]
    if error["type"] == "value_error":
        return _broken_rule(key, str(error["ctx"]["error"]), schema, place)
    if error["type"] == "missing":
        return Problem(place(key), f"{dotted(key)} is missing.")
    value = f"{dotted(key)} = {shown(error['input'])}"
    inside, element = _element_around(key, schema)
    if error["type"] == "extra_forbidden":
        return Problem(place(key), f"{value}: unknown key; {suggestion(inside, key_fields(element), elsewhere={})}")
    table = dotted(name for name in key if isinstance(name, str))
    if inside in sections(element):
        return Problem(place(key), f"{value}: must be a table, [{table}], with keys of its own.")
    field = key_fields(element).get(inside)
    if field is None:  # inside a list or a table of values: data.sources."folder"
        return Problem(place(key), f"{value}: {_lower_first(error['msg'])}.")
    meaning = meanings(sections(element)[inside[:-1]]).get(str(inside[-1]), "")
    if element_of(field) and get_origin(value_type(field)) is tuple:
        wanted = f"a list of tables; write [[{table}]] before the keys of each"
    else:
        wanted = allowed(field)
    is_replaced = key in replaced and replaced[key] != error["input"]
    instead = replaced[key] if is_replaced else field.default
    return Problem(place(key), f"{value}: must be {wanted}.{_remedy(inside, field, instead, error['input'], meaning)}")


def _element_around(key: Key, schema: type[Section]) -> tuple[Key, type[Section]]:
    """The key inside the element of a list or table of sections that `key` points into, and that element's schema."""
    for depth in range(1, len(key) - 1):
        field = key_fields(schema).get(key[:depth])
        if field and (element := element_of(field)):
            return key[depth + 1 :], element
    return key, schema


def _broken_rule(key: Key, rule: str, schema: type[Section], place: Callable[[Key], KeyPlace]) -> Problem:
    """A rule between keys; its sentence begins with the key to blame, relative to its section."""
    blamed = key + tuple(rule.split(" ", 1)[0].split("."))
    rule += "" if rule.endswith("?") else "."
    if blamed in key_fields(schema):
        return Problem(place(blamed), f"{dotted(key)}{'.' * bool(key)}{rule}", is_rule=True)
    return Problem(place(key), f"{dotted(key)}: {rule}".removeprefix(": "), is_rule=True)


def allowed(field: FieldInfo) -> str:
    """Return in words what `field` takes: "a whole number above 0"."""
    bounds = [
        f"{word} {getattr(limit, attribute):g}"
        for limit in limits(field)
        for kind, attribute, word in _BOUNDS
        if isinstance(limit, kind)
    ]
    patterns = [f"that matches {m.pattern}" for m in limits(field) if getattr(m, "pattern", None)]
    return " ".join([_kind(value_type(field)), " and ".join(bounds + patterns)]).strip()


_BOUNDS: list[tuple[type, str, str]] = [
    (annotated_types.Gt, "gt", "above"),
    (annotated_types.Ge, "ge", "of at least"),
    (annotated_types.Lt, "lt", "below"),
    (annotated_types.Le, "le", "of at most"),
    (annotated_types.MultipleOf, "multiple_of", "a multiple of"),
]
_KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "text",
    Path: "a path, as text",
    tuple: 'a list, such as ["a", "b"]',
    dict: 'a table, such as {"folder" = 1.0}',
}


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(json.dumps(choice) for choice in get_args(annotation))
    return _KINDS[get_origin(annotation) or annotation]


def _remedy(key: Key, field: FieldInfo, default: object, value: object, meaning: str) -> str:
    """A second line: a value to try, and what the key means. default: the value without this one."""
    meaning = " ".join(["", *meaning.split()])
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    if near := get_close_matches(str(value).lower(), choices, n=1):
        return f"\n  Try {shown(near[0])}.{meaning}"
    is_time = str(key[-1]).endswith("_s")
    if isinstance(value, str) and (unquoted := _unquoted(value, value_type(field), is_time)):
        return f"\n  Try {unquoted}, without the quotes.{meaning}"
    if default is PydanticUndefined or default in (None, (), {}):
        return f"\n {meaning}" if meaning else ""
    return f"\n  Try {shown(default)}, the default{'' if default == field.default else ' here'}.{meaning}"


def _unquoted(text: str, kind: Any, is_time: bool) -> str:
    """Return what `text` should be without its quotes to be of this kind; empty if that would not do either.

    is_time: the value is in seconds, so that "2m" means 120.
    """
    if kind is bool:
        return text.strip().lower() if text.strip().lower() in ("true", "false") else ""
    try:
        number = seconds_of(text) if is_time and DURATION.fullmatch(text) else float(count_of(text))
    except ValueError:
        return ""
    plain = text.strip() if not text.strip()[-1:].isalpha() else f"{number:g}"
    return plain if kind is float or (kind is int and number.is_integer()) else ""


def shown(value: object) -> str:
    """Return the value about as TOML writes it, cut if it is long."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


ELSEWHERE: Mapping[str, str] = {
    "learning_rate": "optimizer.lr",
    "max_lr": "optimizer.lr",
    "peak_lr": "optimizer.lr",
    "min_lr": "schedule.final_ratio",
    "min_lr_ratio": "schedule.final_ratio",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "betas": "optimizer.beta1 and optimizer.beta2, one number each",
    "adam_epsilon": "optimizer.eps",
    "adam_eps": "optimizer.eps",
    "wd": "optimizer.weight_decay",
    "max_grad_norm": "optimizer.grad_clip",
    "clip_grad": "optimizer.grad_clip",
    "gradient_clip_val": "optimizer.grad_clip",
    "gradient_clipping": "optimizer.grad_clip",
    "lr_scheduler": "schedule.kind",
    "lr_scheduler_type": "schedule.kind",
    "lr_schedule": "schedule.kind",
    "scheduler": "schedule.kind",
    "warmup": "schedule.warmup_steps",
    "warmup_iters": "schedule.warmup_steps",
    "num_warmup_steps": "schedule.warmup_steps",
    "warmup_ratio": "schedule.warmup_fraction",
    "decay_ratio": "schedule.decay_fraction",
    "batch_size": "train.global_batch",
    "global_batch_size": "train.global_batch",
    "train_batch_size": "train.global_batch",
    "micro_batch_size": 'the plan\'s microbatch, e.g. plan = "auto,microbatch=4"',
    "per_device_train_batch_size": 'the plan\'s microbatch, e.g. plan = "auto,microbatch=4"',
    "gradient_accumulation_steps": "left to the plan: train.global_batch over its microbatch and replicas",
    "grad_accum": "left to the plan: train.global_batch over its microbatch and replicas",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "total_steps": "train.steps",
    "train_iters": "train.steps",
    "max_iters": "train.steps",
    "iters": "train.steps",
    "iterations": "train.steps",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "max_time": "train.minutes",
    "hidden_size": "model.width",
    "d_model": "model.width",
    "dim": "model.width",
    "n_embd": "model.width",
    "n_layer": "model.layers",
    "n_layers": "model.layers",
    "num_layers": "model.layers",
    "num_hidden_layers": "model.layers",
    "n_head": "model.heads",
    "n_heads": "model.heads",
    "num_heads": "model.heads",
    "num_attention_heads": "model.heads",
    "n_kv_heads": "model.kv_heads",
    "num_key_value_heads": "model.kv_heads",
    "num_query_groups": "model.kv_heads",
    "head_dim": "model.head_width",
    "intermediate_size": "model.ffn_width",
    "ffn_hidden_size": "model.ffn_width",
    "ffn_dim": "model.ffn_width",
    "max_position_embeddings": "model.max_seq_len",
    "rms_norm_eps": "model.norm_eps",
    "tie_word_embeddings": "model.tie_embeddings",
    "initializer_range": "model.init_std",
    "model_type": "model.family",
    "model_name": "model.preset",
    "context_length": "data.seq_len",
    "sequence_length": "data.seq_len",
    "seq_length": "data.seq_len",
    "block_size": "data.seq_len",
    "max_length": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "dataset": "data.sources (prepared folders), or data.prepare.input (text)",
    "datasets": "data.sources (prepared folders), or data.prepare.input (text)",
    "data_path": "data.sources (prepared folders), or data.prepare.input (text)",
    "weights": "data.sources",
    "mixture": "data.sources",
    "save_steps": "checkpoint.every_steps",
    "save_interval": "checkpoint.every_steps",
    "save_every": "checkpoint.every_steps",
    "checkpoint_interval": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "async_save": "checkpoint.background",
    "eval_interval": "evaluate.every_steps",
    "eval_steps": "evaluate.every_steps",
    "eval_every": "evaluate.every_steps",
    "eval_iters": "evaluate.tokens",
    "num_gpus": "launch.processes",
    "n_gpus": "launch.processes",
    "gpus": "launch.processes",
    "nproc": "launch.processes",
    "nproc_per_node": "launch.processes",
    "num_processes": "launch.processes",
    "world_size": "launch.processes",
    "master_port": "launch.port",
    "num_workers": "data.prepare.processes (while training, data needs no workers)",
    "precision": 'a word of the plan, e.g. plan = "auto,precision=bf16"',
    "dtype": 'a word of the plan, e.g. plan = "auto,precision=bf16"',
    "bf16": 'a word of the plan, e.g. plan = "auto,precision=bf16"',
    "tensor_parallel_size": 'a word of the plan, e.g. plan = "tp=2"',
    "pipeline_parallel_size": 'a word of the plan, e.g. plan = "pp=2"',
    "tp": 'a word of the plan, e.g. plan = "tp=2"',
    "pp": 'a word of the plan, e.g. plan = "pp=2"',
    "experiment": "name",
    "run_name": "name",
    "random_seed": "seed",
}
"""Other programs' name of a key -> the key here, or words that say where it went."""


def suggestion(key: Key, known: Collection[Key], mark: str = "", elsewhere: Mapping[str, str] = ELSEWHERE) -> str:
    """The second half of "unknown key; ...": where the user should look instead.

    known: all keys there are. mark: stands before a key in the answer ("--" for options). elsewhere: other names of
    keys, those of a run file unless said.
    """
    if other := elsewhere.get(str(key[-1]).lower()):
        return f"here it is {mark if key_of(other) in known else ''}{other}."
    if near := _in_its_section(key, known, cutoff=0.8):
        return f"did you mean {mark}{dotted(near)}?"
    if there := [k for k in known if k[-1] == key[-1] and k != key]:
        return f"it exists at {' and at '.join(mark + dotted(k) for k in there)}."
    if near := _in_its_section(key, known, cutoff=0.6) or _anywhere(key, known):
        return f"did you mean {mark}{dotted(near)}?"
    if siblings := [str(k[-1]) for k in known if k[:-1] == key[:-1] and len(key) > 1]:
        return f"{dotted(key[:-1])} has: {', '.join(siblings)}."
    return f"there are: {', '.join(sorted({dotted(k[:1]) for k in known}))}."


def _in_its_section(key: Key, known: Collection[Key], cutoff: float) -> Key | None:
    """Return the known key that differs by a typing mistake, in the section's name or in the key's own."""
    tables = {dotted(k[:-1]): k[:-1] for k in known if len(k) > 1} | {"": ()}
    near_tables = get_close_matches(dotted(key[:-1]), tables, n=2, cutoff=0.75)
    for table in [tables[name] for name in near_tables] or [key[:-1]]:
        names = {str(k[-1]): k for k in known if k[:-1] == table}
        if near := get_close_matches(str(key[-1]), names, n=1, cutoff=cutoff):
            return names[near[0]]
    return None


def _anywhere(key: Key, known: Collection[Key]) -> Key | None:
    names = {str(k[-1]): k for k in known} | {dotted(k): k for k in known}
    near = get_close_matches(str(key[-1]), names, n=1, cutoff=0.75) or get_close_matches(
        dotted(key), names, n=1, cutoff=0.75
    )
    return names[near[0]] if near else None
