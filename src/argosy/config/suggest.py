"""Suggestions for a key that does not exist: the key that was probably meant."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches

from argosy.config.keys import Key, dotted, key_of

_NO_EPOCHS = "train.steps: a run is counted in steps, not epochs (steps = tokens / (global_batch * seq_len))"

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
    "warmup_ratio": "schedule.warmup_steps, in steps",
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
    "epochs": _NO_EPOCHS,
    "num_epochs": _NO_EPOCHS,
    "num_train_epochs": _NO_EPOCHS,
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
