"""config.json to and from `ModelConfig`, for `LlamaForCausalLM` and `Qwen3ForCausalLM`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from pydantic import ValidationError

from argosy.config.schema import ModelConfig, RopeScaling
from argosy.errors import UserError
from argosy.models.rope import attention_scale

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""`ModelConfig.family`, which is also their `model_type` -> their class."""

KEYS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "ffn_width": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "attention_bias": "attention_bias",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
"""Field of `ModelConfig` -> key of config.json, where the value is the same."""

ROPE_KEYS = {
    "none": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_seq_len": "original_max_position_embeddings",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_max_seq_len": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
    },
}
"""`RopeScaling.kind` -> its fields -> their keys. Their name for "none" is "default"."""

COMMON_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": COMMON_DEFAULTS | {"max_position_embeddings": 2048},
    "qwen3": COMMON_DEFAULTS | {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
"""What transformers takes for a key that config.json leaves out; sizes without a default must be there."""


def config_to_json(config: ModelConfig, *, dtype: torch.dtype, eod_id: int | None) -> dict[str, Any]:
    """What config.json says. Raises: UserError if the family's class has no way to say it."""
    if config.qk_norm != (config.family == "qwen3"):
        raise UserError(
            f"model.qk_norm = {str(config.qk_norm).lower()} and model.family = {config.family}: "
            f"Qwen3 has norms on queries and keys, Llama has none. "
            f'Export with family = "{"qwen3" if config.qk_norm else "llama"}".'
        )
    if config.family == "llama" and config.width % config.heads:
        raise UserError(
            f"model.width = {config.width} is not a multiple of model.heads = {config.heads}, which "
            f"LlamaForCausalLM refuses whatever head_width is. Choose sizes that divide, or the family qwen3."
        )
    scaling = config.rope_scaling
    rope = {theirs: getattr(scaling, ours) for ours, theirs in ROPE_KEYS[scaling.kind].items()}
    return {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        **{theirs: getattr(config, ours) for ours, theirs in KEYS.items()},
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        # transformers 4 reads only these two keys, and 5 reads them as well as its own `rope_parameters`.
        "rope_theta": config.rope_theta,
        "rope_scaling": {"rope_type": scaling.kind, **rope} if rope else None,
        "bos_token_id": None,
        "eos_token_id": eod_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
    }


def config_from_json(values: Mapping[str, Any], file: Path) -> ModelConfig:
    """The `ModelConfig` of a config.json, read from `file`. Raises: UserError."""
    family = _family(values, file)
    given = DEFAULTS[family] | {key: value for key, value in values.items() if value is not None}
    _refuse_what_differs(given, file)
    for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size"):
        if key not in given:
            raise UserError(f"{file}: {key} is missing. Add it, as the model's authors give it.")
    given.setdefault("num_key_value_heads", given["num_attention_heads"])
    given.setdefault("head_dim", given["hidden_size"] // given["num_attention_heads"])
    theta, scaling = _rope_from_json(given, file)
    try:
        return ModelConfig(
            family=family,
            qk_norm=family == "qwen3",
            rope_theta=theta,
            rope_scaling=RopeScaling.model_validate(scaling),
            **{ours: given[theirs] for ours, theirs in KEYS.items()},
        )
    except ValidationError as error:
        theirs = KEYS | ROPE_KEYS["llama3"] | ROPE_KEYS["yarn"]
        lines = [
            f"{file}: {' '.join(theirs.get(str(k), str(k)) for k in e['loc']) or 'sizes'}: {e['msg']} "
            f"(config.json says {e['input'] if e['loc'] else 'otherwise'}). Is the file the authors' own?"
            for e in error.errors()
        ]
        raise UserError("\n".join(lines)) from None


def _family(values: Mapping[str, Any], file: Path) -> str:
    family, classes = values.get("model_type"), values.get("architectures") or []
    known = ", ".join(f"{name} ({its_class})" for name, its_class in ARCHITECTURES.items())
    if family == "qwen2":
        refuse(file, "model_type", family, f"Qwen2 has biases on q, k, v and none on o; known are {known}")
    if family not in ARCHITECTURES:
        refuse(file, "model_type", family, f"this architecture is not known; known are {known}")
    if classes and ARCHITECTURES[family] not in classes:
        refuse(file, "architectures", classes, f"this architecture is not known; known are {known}")
    return str(family)


def _refuse_what_differs(given: Mapping[str, Any], file: Path) -> None:
    """Keys that change what the model computes, beyond what our decoder can do."""
    if "quantization_config" in given:
        method = given["quantization_config"].get("quant_method", "of an unnamed kind")
        refuse(file, "quantization_config", method, "quantized weights cannot be trained on")
    if given.get("hidden_act", "silu") != "silu":
        refuse(file, "hidden_act", given["hidden_act"], "our feed-forward is SwiGLU (silu)")
    if given.get("mlp_bias"):
        refuse(file, "mlp_bias", True, "our feed-forward has no biases")
    if given.get("use_sliding_window") or "sliding_attention" in given.get("layer_types", ()):
        refuse(file, "use_sliding_window", True, "our attention reads the whole document")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        refuse(file, "partial_rotary_factor", given["partial_rotary_factor"], "we rotate whole heads")


def _rope_from_json(given: Mapping[str, Any], file: Path) -> tuple[float, dict[str, Any]]:
    """Base of the frequencies, and the fields of `RopeScaling`; from either version's keys."""
    section = "rope_scaling" if given.get("rope_scaling") else "rope_parameters"
    rope = {key: value for key, value in (given.get(section) or {}).items() if value is not None}
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    theta = rope.pop("rope_theta", given.get("rope_theta", 10_000.0))
    kind = "none" if kind == "default" else kind
    if kind not in ROPE_KEYS:
        refuse(file, f"{section}.rope_type", kind, "known are default, linear, llama3, yarn")
    keys = ROPE_KEYS[kind]
    if "original_max_seq_len" in keys:
        original = given.get("original_max_position_embeddings", given["max_position_embeddings"])
        rope.setdefault("original_max_position_embeddings", original)
    scaling = {"kind": kind} | {ours: rope.pop(theirs) for ours, theirs in keys.items() if theirs in rope}
    if kind == "yarn":
        scaling.setdefault("factor", given["max_position_embeddings"] / scaling["original_max_seq_len"])
    for ours in ("factor", "low_freq_factor", "high_freq_factor"):
        if ours in keys and ours not in scaling:
            raise UserError(f"{file}: {section}.{keys[ours]} is missing, and {kind} needs it. Add it.")
    _refuse_rope_leftovers(rope, scaling, f"{section}.", file)
    return theta, scaling


def _refuse_rope_leftovers(rope: Mapping[str, Any], scaling: Mapping[str, Any], section: str, file: Path) -> None:
    """What no field of ours holds is only let through if it says what we do anyway."""
    ours = {"partial_rotary_factor": 1.0}
    if scaling["kind"] == "yarn":
        ours |= {"truncate": True, "attention_factor": attention_scale(RopeScaling.model_validate(scaling))}
    for key, value in rope.items():
        if key not in ours or not math.isclose(value, ours[key], rel_tol=1e-6):
            refuse(file, section + key, value, f"only {ours[key]} is known" if key in ours else "not known")


def refuse(file: Path, key: str, value: object, why: str) -> NoReturn:
    """Raise the UserError for what a folder holds and we cannot use."""
    raise UserError(f"{file}: {key} = {json.dumps(value)}: {why}. Choose another model.")
