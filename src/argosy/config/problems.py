"""Messages about wrong keys and values: a sentence that says what is allowed, and ends in what to do."""

from __future__ import annotations

import json
import re
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
        message = error["msg"]
        return Problem(place(key), f"{value}: {message[:1].lower()}{message[1:]}.")
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
    """A rule between keys; its sentence begins with the key to blame, relative to its section: jobs[1].after."""
    names = re.findall(r"[^.\[\]]+", rule.split(" ", 1)[0])
    blamed = (*key, *(int(name) if name.isdecimal() else name for name in names))
    inside, element = _element_around(blamed, schema)
    rule += "" if rule.endswith(("?", ".")) else "."
    if inside in key_fields(element):
        return Problem(place(blamed), f"{dotted(key)}{'.' * bool(key)}{rule}", is_rule=True)
    return Problem(place(key), f"{dotted(key)}: {rule}".removeprefix(": "), is_rule=True)


def allowed(field: FieldInfo) -> str:
    """Return in words what `field` takes: "a whole number above 0"."""
    bounds = [
        f"{word} {_in_full(getattr(limit, attribute))}"
        for limit in limits(field)
        for kind, attribute, word in _BOUNDS
        if isinstance(limit, kind)
    ]
    patterns = [f"that matches {m.pattern}" for m in limits(field) if getattr(m, "pattern", None)]
    return " ".join([_kind(value_type(field)), " and ".join(bounds + patterns)]).strip()


def _in_full(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


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


_ELSEWHERE: Mapping[str, str] = {
    "optimizer.lr": "learning_rate max_lr peak_lr",
    "schedule.final_ratio": "min_lr min_lr_ratio",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.beta1 and optimizer.beta2, one number each": "betas",
    "optimizer.eps": "adam_epsilon adam_eps",
    "optimizer.weight_decay": "wd",
    "optimizer.grad_clip": "max_grad_norm clip_grad gradient_clip_val gradient_clipping",
    "schedule.kind": "lr_scheduler lr_scheduler_type lr_schedule scheduler",
    "schedule.warmup_steps": "warmup warmup_iters num_warmup_steps",
    "schedule.warmup_fraction": "warmup_ratio",
    "schedule.decay_fraction": "decay_ratio",
    "train.global_batch": "batch_size global_batch_size train_batch_size",
    'the plan\'s microbatch, e.g. plan = "auto,microbatch=4"': "micro_batch_size per_device_train_batch_size",
    "left to the plan: train.global_batch over its microbatch and replicas": "gradient_accumulation_steps grad_accum",
    "train.steps": "max_steps num_steps total_steps train_iters max_iters iters iterations",
    "train.epochs": "num_epochs num_train_epochs",
    "train.minutes": "max_time",
    "model.width": "hidden_size d_model dim n_embd",
    "model.layers": "n_layer n_layers num_layers num_hidden_layers",
    "model.heads": "n_head n_heads num_heads num_attention_heads",
    "model.kv_heads": "n_kv_heads num_key_value_heads num_query_groups",
    "model.head_width": "head_dim",
    "model.ffn_width": "intermediate_size ffn_hidden_size ffn_dim",
    "model.max_seq_len": "max_position_embeddings",
    "model.norm_eps": "rms_norm_eps",
    "model.tie_embeddings": "tie_word_embeddings",
    "model.init_std": "initializer_range",
    "model.family": "model_type",
    "model.preset": "model model_name",
    "model.weights": "model_name_or_path pretrained_model_name_or_path init_from",
    "data.seq_len": "context_length sequence_length seq_length block_size max_length max_seq_length",
    "data.sources (prepared folders), or data.prepare.input (text)": "dataset datasets data_path",
    "data.sources": "weights mixture",
    "checkpoint.every_steps": "save_steps save_interval save_every checkpoint_interval",
    "checkpoint.keep_last": "save_total_limit",
    "checkpoint.background": "async_save",
    "evaluate.every_steps": "eval_interval eval_steps eval_every",
    "evaluate.tokens": "eval_iters",
    "launch.processes": "num_gpus n_gpus gpus nproc nproc_per_node num_processes world_size",
    "launch.port": "master_port",
    "data.prepare.processes (while training, data needs no workers)": "num_workers",
    'a word of the plan, e.g. plan = "auto,precision=bf16"': "precision dtype bf16",
    'a word of the plan, e.g. plan = "tp=2"': "tensor_parallel_size tp",
    'a word of the plan, e.g. plan = "pp=2"': "pipeline_parallel_size pp",
    'a word of the plan, e.g. plan = "dp_shard=8,zero=3"': "fsdp deepspeed zero zero_stage",
    'a word of the plan, e.g. plan = "auto,recompute=selective"': "gradient_checkpointing activation_checkpointing",
    'a word of the plan, e.g. plan = "auto,compile=true"': "compile torch_compile",
    "the default: the same command goes on from the newest checkpoint": "resume resume_from_checkpoint",
    "name": "experiment run_name",
    "name (the folder is runs/NAME), or the option --run-dir": "output_dir out_dir save_dir dump_folder",
    "seed": "random_seed",
}
"""The key here, or words that say where it went -> other programs' names of it."""
ELSEWHERE = {name: here for here, names in _ELSEWHERE.items() for name in names.split()}


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
