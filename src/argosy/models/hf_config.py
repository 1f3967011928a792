"""Conversion between config.json and `ModelConfig`, for the classes of `hf_families`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, ValidationError, create_model

from argosy.config.load import MOST_PROBLEMS
from argosy.config.model import MOST_LAYERS, ModelConfig, RopeScaling
from argosy.config.section import dotted, key_fields, key_of, nest
from argosy.errors import UserError
from argosy.models.hf_families import DEFAULTS, FAMILIES, KEYS, family_of, value_of
from argosy.models.rope import attention_scale

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

HAS_QK_NORM = ("qwen3", "qwen3_moe")
MOE_FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3")
MLA_YARN = {"mscale": 1.0, "mscale_all_dim": 1.0}
"""With these values, DeepSeek's attention applies YaRN's temperature to the whole head, as `models.mla` does."""


def config_to_json(config: ModelConfig, *, dtype: torch.dtype, eod_id: int | None) -> dict[str, Any]:
    """Return the values of config.json. Raises: UserError if the family's class cannot express the model."""
    _refuse_what_the_class_cannot_say(config)
    family = family_of(config.family)
    scaling = config.rope_scaling
    rope = {theirs: getattr(scaling, ours) for ours, theirs in ROPE_KEYS[scaling.kind].items()}
    if scaling.kind == "yarn" and config.mla.kv_rank:
        rope |= MLA_YARN
    return {
        "architectures": [family.architecture],
        "model_type": config.family,
        **{theirs: value_of(config, ours) for ours, theirs in (KEYS | family.keys).items()},
        **family.constants,
        **_unlike_keys(config),
        "hidden_act": family.hidden_act,
        "attention_dropout": 0.0,
        # transformers 4 reads only these two keys, and 5 reads them as well as its own `rope_parameters`.
        "rope_theta": config.rope_theta,
        "rope_scaling": {"rope_type": scaling.kind, **rope} if rope else None,
        "bos_token_id": None,
        "eos_token_id": eod_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
    }


def _unlike_keys(config: ModelConfig) -> dict[str, Any]:
    """Return the keys whose value is not simply that of a field."""
    if config.family == "qwen3_moe":
        return {"mlp_only_layers": list(range(config.moe.first_dense_layers))}
    if config.family == "deepseek_v3":
        return {"q_lora_rank": config.mla.q_rank or None, "num_nextn_predict_layers": 0}
    return {}


def _refuse_what_the_class_cannot_say(config: ModelConfig) -> None:
    family = config.family
    if config.qk_norm != (family in HAS_QK_NORM):
        raise UserError(
            f"model.qk_norm = {str(config.qk_norm).lower()} and model.family = {family}: "
            f"Qwen3 has norms on queries and keys, other families have none. "
            f'Export with family = "{"qwen3" if config.qk_norm else "llama"}".'
        )
    if family == "llama" and config.width % config.heads:
        raise UserError(
            f"model.width = {config.width} is not a multiple of model.heads = {config.heads}, which "
            f"LlamaForCausalLM refuses whatever head_width is. Choose sizes that divide, or the family qwen3."
        )
    for field, wanted in family_of(family).fixed.items():
        value = value_of(config, field)
        if value != wanted and {value, wanted} != {"none", "aux"}:  # these two differ only in training
            raise UserError(
                f"model.{field} = {json.dumps(value)} and model.family = {family}: {family_of(family).architecture} "
                f"computes as with {json.dumps(wanted)}. Choose that, or another family."
            )
    if family in MOE_FAMILIES and not config.moe.experts:
        raise UserError(f"model.moe.experts = 0 and model.family = {family}: a dense model. Export as llama or qwen3.")
    if family == "deepseek_v3" and not (config.mla.kv_rank and config.moe.shared_experts):
        raise UserError(
            f"model.mla.kv_rank = {config.mla.kv_rank}, moe.shared_experts = {config.moe.shared_experts} and "
            f"model.family = deepseek_v3: the class wants both. Choose another family."
        )


def config_from_json(values: Mapping[str, Any], file: Path) -> ModelConfig:
    """Return the `ModelConfig` for the values of a config.json, which were read from `file`. Raises: UserError."""
    _check_kinds(values, ConfigJson, file)
    family = _family(values, file)
    known = FAMILIES[family]
    theirs = KEYS | known.keys
    _check_kinds(values, _sizes_of({key: ours for ours, key in theirs.items()}), file)
    written = {known.aliases.get(key, key): value for key, value in values.items() if value is not None}
    given = DEFAULTS | known.defaults | written
    _refuse_what_differs(given, family, file)
    for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size"):
        if key not in given:
            raise UserError(f"{file}: {key} is missing. Add it, as the model's authors give it.")
    given.setdefault("num_key_value_heads", given["num_attention_heads"])
    given.setdefault("head_dim", given.get("qk_rope_head_dim", given["hidden_size"] // given["num_attention_heads"]))
    found = known.fixed | {ours: given[key] for ours, key in theirs.items()}
    found |= _from_unlike_keys(values, family, file)
    try:
        theta, scaling = _rope_from_json(given, family, file)
        return ModelConfig(
            family=family,
            qk_norm=family in HAS_QK_NORM,
            rope_theta=theta,
            rope_scaling=RopeScaling.model_validate(scaling),
            **nest({tuple(ours.split(".")): value for ours, value in found.items()}),
        )
    except ValidationError as error:
        raise _refusal(error, theirs | ROPE_KEYS["llama3"] | ROPE_KEYS["yarn"], file) from None


class RopeJson(BaseModel):
    """What is read of the rotary embedding; null stands for what is missing."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    rope_type: str | None = None
    type: str | None = None
    rope_theta: PositiveFloat | None = None
    factor: PositiveFloat | None = None
    original_max_position_embeddings: Annotated[PositiveFloat, Field(le=2**53)] | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    beta_fast: PositiveFloat | None = None
    beta_slow: PositiveFloat | None = None
    attention_factor: PositiveFloat | None = None
    partial_rotary_factor: PositiveFloat | None = None
    truncate: bool | None = None


class ConfigJson(BaseModel):
    """What is read of any config.json beside the keys that are fields of `ModelConfig`."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model_type: str | None = None
    architectures: list[str] | None = None
    layer_types: list[str] | None = None
    mlp_only_layers: Annotated[list[NonNegativeInt], Field(max_length=MOST_LAYERS)] | None = None
    q_lora_rank: NonNegativeInt | None = None
    original_max_position_embeddings: Annotated[PositiveFloat, Field(le=2**53)] | None = None
    quantization_config: dict[str, Any] | None = None
    rope_theta: PositiveFloat | None = None
    rope_scaling: RopeJson | None = None
    rope_parameters: RopeJson | None = None


def _sizes_of(ours: Mapping[str, str]) -> type[BaseModel]:
    """Return the model of the keys of config.json that are fields of ours, with the limits of these."""
    found = {key: key_fields(ModelConfig)[key_of(name)] for key, name in ours.items()}
    kinds: dict[str, Any] = {
        key: (Annotated[info.annotation, Field(), *info.metadata] | None, None) for key, info in found.items()
    }
    return create_model("SizesJson", __config__=ConfigDict(strict=True, allow_inf_nan=False), **kinds)


def _check_kinds(values: Mapping[str, Any], kinds: type[BaseModel], file: Path) -> None:
    """Raise UserError for values that are no numbers, texts or lists where `kinds` has these, or out of bounds."""
    try:
        kinds.model_validate(values)
    except ValidationError as error:
        raise _refusal(error, {}, file) from None


def _refusal(error: ValidationError, theirs: Mapping[str, str], file: Path) -> UserError:
    """Return the error that names what is wrong by the keys of config.json; theirs: our field -> their key."""
    found = error.errors(include_url=False)
    lines = [
        f"{file}: {theirs.get(dotted(e['loc']), dotted(e['loc'])) or 'sizes'}: {e['msg'][:200]} "
        f"(config.json says {_in_json(e['input']) if e['loc'] else 'otherwise'}). Is the file the authors' own?"
        for e in found[:MOST_PROBLEMS]
    ]
    return UserError("\n".join([*lines, *(["..."] if found[MOST_PROBLEMS:] else [])]))


def _in_json(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _from_unlike_keys(values: Mapping[str, Any], family: str, file: Path) -> dict[str, Any]:
    """Return the fields that `_unlike_keys` wrote."""
    if family == "qwen3_moe":
        dense = values.get("mlp_only_layers") or []
        if sorted(dense) != list(range(len(dense))):
            refuse(file, "mlp_only_layers", dense, "our dense layers are the first ones")
        return {"moe.first_dense_layers": len(dense)}
    if family == "deepseek_v3":
        q_rank = values.get("q_lora_rank", FAMILIES[family].defaults["q_lora_rank"])
        return {"mla.q_rank": q_rank or 0}
    return {}


def _family(values: Mapping[str, Any], file: Path) -> str:
    family, classes = values.get("model_type"), values.get("architectures") or []
    known = ", ".join(f"{name} ({its.architecture})" for name, its in FAMILIES.items())
    if family not in FAMILIES:
        refuse(file, "model_type", family, f"this architecture is not known; known are {known}")
    if classes and FAMILIES[family].architecture not in classes:
        refuse(file, "architectures", classes, f"this architecture is not known; known are {known}")
    return str(family)


def _refuse_what_differs(given: Mapping[str, Any], family: str, file: Path) -> None:
    """Raise UserError for keys that make the model compute what our decoder cannot."""
    if "quantization_config" in given:
        method = given["quantization_config"].get("quant_method", "of an unnamed kind")
        refuse(file, "quantization_config", method, "quantized weights cannot be trained on")
    if given.get("hidden_act", "silu") != "silu":
        refuse(file, "hidden_act", given["hidden_act"], "our feed-forward is SwiGLU (silu)")
    if given.get("mlp_bias"):
        refuse(file, "mlp_bias", True, "our feed-forward has no biases")
    if given.get("use_sliding_window") or "sliding_attention" in given.get("layer_types", ()):
        refuse(file, "use_sliding_window", True, "our attention reads the whole document")
    if family == "mixtral" and "sliding_window" in given:
        refuse(file, "sliding_window", given["sliding_window"], "our attention reads the whole document")
    for key, only in FAMILIES[family].constants.items():
        if given.get(key, only) != only:
            refuse(file, key, given[key], f"only {json.dumps(only)} is known")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        refuse(file, "partial_rotary_factor", given["partial_rotary_factor"], "we rotate whole heads")


def _rope_from_json(given: Mapping[str, Any], family: str, file: Path) -> tuple[float, dict[str, Any]]:
    """Return the base of the frequencies and the fields of `RopeScaling`, from the keys of either version."""
    section = "rope_scaling" if given.get("rope_scaling") else "rope_parameters"
    rope = {key: value for key, value in (given.get(section) or {}).items() if value is not None}
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    theta = rope.pop("rope_theta", given["rope_theta"])
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
    if family == "deepseek_v3" and kind == "yarn":
        for key, only in MLA_YARN.items():
            if rope.pop(key, None) != only:
                refuse(file, f"{section}.{key}", None, f"only {only} is known, and it must be there")
    _refuse_rope_leftovers(rope, scaling, f"{section}.", file)
    return theta, scaling


def _refuse_rope_leftovers(rope: Mapping[str, Any], scaling: Mapping[str, Any], section: str, file: Path) -> None:
    """Raise UserError for a key without a field of ours, unless it says what we do anyway."""
    ours = {"partial_rotary_factor": 1.0}
    if scaling["kind"] == "yarn":
        ours |= {"truncate": True, "attention_factor": attention_scale(RopeScaling.model_validate(scaling))}
    for key, value in rope.items():
        if key not in ours or not math.isclose(value, ours[key], rel_tol=1e-6):
            refuse(file, section + key, value, f"only {ours[key]} is known" if key in ours else "not known")


def refuse(file: Path, key: str, value: object, why: str) -> NoReturn:
    """Raise the UserError for something in a folder that we cannot use."""
    raise UserError(f"{file}: {key[:100]} = {_in_json(value)}: {why}. Choose another model.")
