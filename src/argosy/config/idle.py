"""Keys that a run does not read under its other keys, such as optimizer.momentum with adamw: who sets one is told."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path

from argosy.config.load import NOWHERE, OPTION_MARK, load, origin_of, run_preset
from argosy.config.optimizer import OPTIMIZERS
from argosy.config.problems import shown
from argosy.config.schema import RunConfig
from argosy.config.section import dotted, key_fields
from argosy.errors import ArgosyWarning

GIVEN, LEFT_OUT, SEVERAL = "*", "-", "+"
"""Words of a row: the other key has a value, or none (0, false, empty); a plan's axis has several ranks."""
PLAN, SYNC = "plan.", "plan.sync"
WRITTEN_ALWAYS = "data.prepare.out"
"""The file of every run's folder has its place, though nobody gave it."""
_ROUNDS, _COMPRESSED, _PREFERENCES = "local diloco", "int8 int4 powersgd topk sign", "dpo ipo simpo orpo kto"
_KIND, _OBJECTIVE, _FILTERS = "model.rope_scaling.kind", "train.objective", "data.prepare.filters"
_SINKS = ("tensorboard", "wandb", "mlflow", "trackio", "prometheus", "opentelemetry")
_WEBHOOK = "observe.alerts.webhook observe.alerts.webhook_env"

READ_WITH: tuple[tuple[str, str, str, str], ...] = (
    ("plan", "schedule", "plan.pp", SEVERAL),
    ("plan", "stages_per_rank", "plan.schedule", "interleaved_1f1b interleaved_zero_bubble"),
    ("plan", "zero", "plan.dp_shard plan.cp", SEVERAL),
    ("plan", "context", "plan.cp", SEVERAL),
    ("plan", "recompute_every", "plan.recompute", "selective full"),
    ("optimizer", "eps", "optimizer.kind", "adamw muon"),
    ("optimizer", "momentum", "optimizer.kind", "muon"),
    ("schedule", "decay_fraction", "schedule.kind", "wsd"),
    ("schedule", "final_ratio", "schedule.kind", "cosine wsd"),
    ("schedule", "warmup_steps", "schedule.warmup_fraction", LEFT_OUT),
    ("train", "minutes epochs", "train.steps", LEFT_OUT),
    ("train", "minutes", "train.epochs", LEFT_OUT),
    ("preference", "beta", _OBJECTIVE, _PREFERENCES),
    ("preference", "margin", _OBJECTIVE, "simpo"),
    ("preference", "label_smoothing", _OBJECTIVE, "dpo"),
    ("preference", "desirable_weight undesirable_weight", _OBJECTIVE, "kto"),
    ("preference", "centring", _OBJECTIVE, "reward"),
    ("lora", "*", "lora.rank", GIVEN),
    ("data.prepare", "*", "data.prepare.input", GIVEN),
    ("data.prepare", "vocab_size", "data.prepare.tokenizer", LEFT_OUT),
    ("data.prepare", "chat_template", _OBJECTIVE, f"sft {_PREFERENCES} reward"),
    (_FILTERS, "language_score", f"{_FILTERS}.languages", GIVEN),
    (_FILTERS, "url_field", f"{_FILTERS}.blocked_urls", GIVEN),
    (_FILTERS, "ngram buckets bucket_hashes", f"{_FILTERS}.duplicates", "drop_near"),
    ("evaluate", "task_limit task_fewshot", "evaluate.tasks", GIVEN),
    ("launch", "port", "launch.coordinator", LEFT_OUT),
    ("resilience", "rewind_after", "resilience.on_bad_step", "rewind"),
    ("sync", "servers shards server_launch local_steps max_staleness staleness_rate", SYNC, "async"),
    ("sync", "shards", "sync.servers", LEFT_OUT),
    ("sync", "every_steps from_step fragments overlap_steps mixing quorum", SYNC, _ROUNDS),
    ("sync", "outer_lr outer_momentum", SYNC, "diloco async"),
    ("sync", "wire patience_s tls", SYNC, f"{_ROUNDS} async"),
    ("sync", "block", SYNC, "int8 int4 sign"),
    ("sync", "rounding", SYNC, "int8 int4"),
    ("sync", "rank warm_start", SYNC, "powersgd"),
    ("sync", "density density_steps", SYNC, "topk"),
    ("sync", "momentum", SYNC, "sign"),
    ("sync", "error_feedback min_elements", SYNC, _COMPRESSED),
    ("sync", "exact_steps", SYNC, f"bf16 {_COMPRESSED}"),
    ("observe.alerts", "headers_env", _WEBHOOK, GIVEN),
    ("observe.alerts", "timeout_s", f"{_WEBHOOK} observe.alerts.command", GIVEN),
    ("observe.profile", "ranks memory stacks", "observe.profile.steps", GIVEN),
    *((f"observe.{sink}", "*", "observe.sinks", sink) for sink in _SINKS),
    ("model.moe", "*", "model.moe.experts", GIVEN),
    ("model.moe", "shared_ffn_width shared_gate", "model.moe.shared_experts", GIVEN),
    ("model.moe", "aux_coefficient", "model.moe.balance", "aux bias"),
    ("model.moe", "bias_rate", "model.moe.balance", "bias"),
    ("model.attention", "temperature", "model.attention.rotary_layers", GIVEN),
    ("model.attention", "temperature_floor", "model.attention.temperature", GIVEN),
    (
        *("model.attention", "sliding_rotary_width sliding_rope_theta sliding_rope_scaled"),
        *("model.attention.layers", "sliding"),
    ),
    ("model.attention", "norm_over norm_after_rotary norm_weights norm_unrotated", "model.qk_norm", GIVEN),
    ("model.mla", "*", "model.mla.kv_rank", GIVEN),
    ("model.delta_net", "*", "model.delta_net.key_heads", GIVEN),
    ("model.mtp", "loss_weight", "model.mtp.modules", GIVEN),
    ("model.rope_scaling", "factor", _KIND, "linear llama3 yarn longrope proportional"),
    ("model.rope_scaling", "original_max_seq_len", _KIND, "llama3 yarn longrope"),
    ("model.rope_scaling", "low_freq_factor high_freq_factor", _KIND, "llama3"),
    ("model.rope_scaling", "beta_fast beta_slow truncate", _KIND, "yarn"),
    ("model.rope_scaling", "attention_factor", _KIND, "yarn longrope"),
    ("model.rope_scaling", "rotated_share", _KIND, "proportional"),
)
"""A table, keys of it (* stands for all), other keys, and values of one of these with which the run reads the first."""


def idle_keys(run: RunConfig) -> Iterator[tuple[str, list[str], str]]:
    """Yield each key that has another value than its default and that `run` does not read, the other keys that decide
    this, and a sentence about it."""
    fields = {dotted(key): field for key, field in key_fields(RunConfig).items() if dotted(key) != WRITTEN_ALWAYS}
    changed = [key for key, field in fields.items() if _value(run, key) != field.default]
    if "auto" not in (plan := _plan_words(run)):  # which chooses what is not said, and so what is read
        changed += [f"{PLAN}{word}" for word in plan]
    for table, names, choosers, words in READ_WITH:
        keys = [key for key in changed if _is_of(key, table, names.split())]
        others = choosers.split()
        if keys and not any(_is_read(run, other, words) for other in others):
            changed = [key for key in changed if key not in keys]
            for key in keys:
                yield key, others, f"{key} = {shown(_value(run, key))} has no effect {_why(run, others, words)}."


def load_told(source: str | Path | None, options: Mapping[str, object]) -> RunConfig:
    """Load a run with keys that the command line changes, and warn of each that it or the run file gives in vain.

    Beside a model's preset, keys of the model may be the preset's, which the file of a run's folder spells out. What
    the file gives beside a key that the command line changes has its effect without that.
    Raises: as `load`.
    """
    run = load(source, options, overrides_mark=OPTION_MARK)
    for key, others, sentence in idle_keys(run):
        given = _key_that_gives(key)
        place = origin_of(source, given, options)
        if given in options:
            told = f"{OPTION_MARK}{sentence}" if given == key else f"{place}: {sentence}"
            warnings.warn(told, ArgosyWarning, stacklevel=1)
        elif any(_key_that_gives(other) in options for other in others):
            continue
        elif place != NOWHERE and run_preset(source) is None and not (key.startswith("model.") and run.model.preset):
            warnings.warn(f"{place}: {sentence}", ArgosyWarning, stacklevel=1)
    return run


def _why(run: RunConfig, others: list[str], words: str) -> str:
    if words in (GIVEN, SEVERAL) or _value(run, others[0]) is None:
        return f"without {' or '.join(others)}; give that too, or leave it out"
    now = f"with {others[0]} = {shown(_value(run, others[0]))}"
    if words == LEFT_OUT:
        return f"{now}; leave one out"
    return f"{now}; leave it out, or set that to {' or '.join(words.split())}"


def _is_of(key: str, table: str, names: list[str]) -> bool:
    return key.startswith(f"{table}.") and ("*" in names or key.removeprefix(f"{table}.") in names)


def _is_read(run: RunConfig, other: str, words: str) -> bool:
    value = _value(run, other)
    if words in (GIVEN, LEFT_OUT):
        return bool(value) == (words == GIVEN)
    if words == SEVERAL:
        return value not in (None, 1)
    if (other == SYNC and value == "auto") or (other == "optimizer.kind" and value not in OPTIMIZERS):
        return True
    return bool({*words.split()}.intersection(value if isinstance(value, tuple) else (value,)))


def _key_that_gives(key: str) -> str:
    """Return the key of the run file that gives `key`, which may be a word of its plan."""
    return "plan" if key.startswith(PLAN) else key


def _plan_words(run: RunConfig) -> dict[str, str | int]:
    """Return the keys and values of the plan, as the run file has it; `auto` has no value."""
    parts = ([part.strip() for part in word.partition("=")] for word in run.plan.split(","))
    return {key: int(value) if value.isdecimal() else value for key, _, value in parts if key}


def _value(run: RunConfig, key: str) -> object:
    if key.startswith(PLAN):
        usual = ("diloco" if run.sites else "exact") if key == SYNC else None
        return _plan_words(run).get(key.removeprefix(PLAN), usual)
    return reduce(getattr, key.split("."), run)
