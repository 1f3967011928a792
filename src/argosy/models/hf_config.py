"""Conversion between config.json and `ModelConfig`, for the classes of `hf_families`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    create_model,
)

from argosy.config.load import MOST_PROBLEMS
from argosy.config.model import MOST_LAYERS, ModelConfig, repeated
from argosy.config.section import dotted, key_fields, key_of, nest
from argosy.errors import UserError
from argosy.models.hf_families import FAMILY_OF, family_of
from argosy.models.hf_family import CONFIG_DEFAULTS, CONFIG_KEYS, Family, value_of
from argosy.models.hf_layers import (
    GROUPED,
    ROPE_KEYS,
    RopeJson,
    RopesJson,
    in_json,
    layers_from_json,
    layers_to_json,
    plain,
    refuse,
    rope_from_json,
    rope_to_json,
)
from argosy.models.quantised import check_quantization
from argosy.plan.mup import query_factor
from argosy.plan.parameters import shared_width

ONLY_IN_TRAINING = frozenset(
    f"moe.{n}" for n in ("balance", "bias_rate", "z_coefficient", "capacity_factor", "aux_coefficient")
) | {"mtp.loss_weight"}
OF_LAYERS = frozenset(
    ["ffn_widths"]
    + [f"attention.{n}" for n in ("layers", "rotary_layers", "heads", "kv_heads", "head_widths", "keys_as_values")]
)
"""Lists that are repeated over the layers."""
NOT_STRUCTURE = frozenset(("preset", "weights", "family", "init_std", "mup", "vocab_size", "max_seq_len"))
"""Fields that a class need not be able to say."""
SCORED = {
    name: FAMILY_OF[name].architecture.replace("ForCausalLM", "ForSequenceClassification")
    for name in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "mixtral", "qwen2_moe", "qwen3_moe")
}
"""Family -> the class of its reward models, which read the score at the last token that is no padding."""
NEEDS_BOS = ("cwm",)
"""Families whose class refuses null for the token that begins a text, and has one of its own."""
ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
"""The keys by which these know that they give one number."""
HARMLESS = frozenset(
    (
        *("id2label", "label2id", "num_labels", "problem_type", "architectures", "model_type", "torch_dtype", "dtype"),
        *("use_cache", "transformers_version", "auto_map", "pretraining_tp", "ep_size", "seq_aux", "aux_loss_alpha"),
        *("router_aux_loss_coef", "output_router_logits", "output_attentions", "output_hidden_states", "return_dict"),
        *("initializer_range", "tie_word_embeddings", "num_nextn_predict_layers", "num_mtp_layers"),
        *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype", "max_window_layers"),
        *("sliding_window", "attention_dropout", "hidden_dropout", "residual_dropout", "embedding_dropout"),
        *("resid_pdrop", "embd_pdrop", "router_jitter_noise", "chunk_size_feed_forward", "is_encoder_decoder"),
        *("name_or_path", "cache_implementation", "head_dim", "qk_head_dim", "num_key_value_heads", "rope_theta"),
        *("rope_scaling", "rope_parameters", "original_max_position_embeddings", "partial_rotary_factor"),
        *("quantization_config", "rope_interleave", "rope_interleaved", "mlp_bias", "hidden_act", "hidden_activation"),
        *("initial_context_length", "experts_per_token", "initializer_factor", "layer_types", "unsloth_fixed"),
        *("unsloth_version", "use_sliding_window", "sliding_window_pattern", "_sliding_window_pattern"),
        *("add_cross_attention", "eod_token_id", "text_config", "bos_token_id", "eos_token_id", "pad_token_id"),
        *("sep_token_id", "decoder_start_token_id", "topk_method", "n_group", "topk_group", "norm_topk_prob"),
        *("attention_bias", "no_rope_layers", "no_rope_layer_interval", "swiglu_alpha", "rms_norm_eps"),
        *("rope_local_base_freq", "first_k_dense_replace", "q_lora_rank", "hidden_size", "moe_intermediate_size"),
        *("is_llama_config", "transformers.js_config", "model_name", "tokenizer_class", "model_max_length"),
        *("use_parallel_embedding", "use_embedding_sharing", "layer_switch"),
    )
)
"""Keys that change nothing in what the model computes, or are read elsewhere in this file."""


def config_to_json(
    config: ModelConfig, *, dtype: torch.dtype, eod_id: int | None, pad_id: int | None = None
) -> dict[str, Any]:
    """Return the values of config.json. Raises: UserError if the family's class cannot express the model.

    pad_id: that of a reward model, whose class reads the score at the last token that is another; None: at the last.
    """
    _refuse_sizes_of_other_classes(config)
    family = family_of(config.family)
    if "moe.shared_ffn_width" in _keys(family):  # the class does not know that 0 follows from other sizes
        moe = config.moe.model_copy(update={"shared_ffn_width": shared_width(config)})
        config = config.model_copy(update={"moe": moe})
    if config.score and config.family not in SCORED:
        raise UserError(
            f"model.score = true and model.family = {config.family}: transformers has no class for its reward models "
            f"that is known here. Known are those of {', '.join(SCORED)}."
        )
    of_score = {"architectures": [SCORED[config.family]], **ONE_LABEL, "pad_token_id": pad_id} if config.score else {}
    values = {
        "architectures": [family.architecture],
        "model_type": config.family,
        **{theirs: plain(value_of(config, ours)) for ours, theirs in _keys(family).items()},
        **{form.key: form.write(value_of(config, ours)) for ours, form in family.converted.items()},
        **{key: only[0] if isinstance(only, tuple) else only for key, only in family.constants.items()},
        **layers_to_json(config, family),
        family.act_key: family.hidden_act,
        "attention_dropout": 0.0,
        **rope_to_json(config, family),
        **({} if config.family in NEEDS_BOS else {"bos_token_id": None}),
        "eos_token_id": eod_id,
        "pad_token_id": None,  # the class's own may be beyond the vocabulary
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
        **of_score,
    }
    if config.family in FAMILY_OF:
        _refuse_what_the_class_cannot_say(config, values)
    return values


def _keys(family: Family) -> dict[str, str]:
    """Return the fields of ours that are one key, and these."""
    return {ours: theirs for ours, theirs in (CONFIG_KEYS | family.keys).items() if ours not in family.fixed}


def _refuse_sizes_of_other_classes(config: ModelConfig) -> None:
    name, family = config.family, family_of(config.family)
    if config.qk_norm != bool(family.fixed.get("qk_norm", config.qk_norm and "qk_norm" in _keys(family))):
        raise UserError(
            f"model.qk_norm = {str(config.qk_norm).lower()} and model.family = {name}: Qwen3 and some others have "
            f"norms on queries and keys, other families have none. Export with family = "
            f'"{"qwen3" if config.qk_norm else "llama"}".'
        )
    attention = config.attention
    if query_factor(config) != 1.0 and config.qk_norm and not (attention.norm_weights and attention.norm_unrotated):
        raise UserError(
            f"model.mup.base_head_width = {config.mup.base_head_width} and model.family = {name}: its factor on "
            "queries is exported in the weights of their norms, and some layers have none. Choose another family."
        )
    if name == "llama" and config.width % config.heads:
        raise UserError(
            f"model.width = {config.width} is not a multiple of model.heads = {config.heads}, which "
            f"LlamaForCausalLM refuses whatever head_width is. Choose sizes that divide, or the family qwen3."
        )
    if family.has_experts and not config.moe.experts:
        raise UserError(f"model.moe.experts = 0 and model.family = {name}: a dense model. Export as llama or qwen3.")
    if missing := [field for field in family.needs if not value_of(config, field)]:
        raise UserError(
            f"{', '.join(f'model.{field} = {value_of(config, field)}' for field in missing)} and model.family = "
            f"{name}: the class wants {' and '.join(family.needs)} above 0. Choose another family."
        )


def _refuse_what_the_class_cannot_say(config: ModelConfig, values: Mapping[str, Any]) -> None:
    """Raise UserError unless reading what is written gives the model again."""
    family = FAMILY_OF[config.family]
    none = {"moe.experts": 0, "mla.kv_rank": 0, "delta_net.key_heads": 0, "mtp.modules": 0}
    for field, wanted in (none | family.fixed).items():
        known = field in _keys(family) or field in family.converted
        if not known and value_of(config, field) != wanted and field not in ONLY_IN_TRAINING - {"moe.balance"}:
            _refuse_field(config, field, wanted)
    try:
        again = config_from_json(json.loads(json.dumps(values)), Path("config.json"))
    except UserError as refused:
        raise UserError(f"model.family = {config.family}: {family.architecture} cannot say it: {refused}") from None
    for field, _, found in _differences(config, again):
        if key_of(field)[0] not in NOT_STRUCTURE:
            _refuse_field(config, field, found)


def is_same_model(one: ModelConfig, other: ModelConfig) -> bool:
    """Return True if two models compute the same with the same weights, and have the same vocabulary and context."""
    nothing = frozenset(("preset", "weights", "init_std"))
    return one.family == other.family and all(
        key_of(field)[0] in nothing or {found, ours} == {"none", "aux"}
        for field, found, ours in _differences(one, other)
    )


def _differences(config: ModelConfig, other: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield the fields, and their values, in which two models differ: not those of training, or of parts they lack."""
    for key in key_fields(ModelConfig):
        field = dotted(key)
        if field in ONLY_IN_TRAINING or _unused(config, field):
            continue
        ours, theirs = value_of(config, field), value_of(other, field)
        if field in OF_LAYERS and ours and theirs:  # one list may be longer than what it repeats
            ours, theirs = (tuple(repeated(x, i, None) for i in range(config.all_layers)) for x in (ours, theirs))
        if ours != theirs and not (isinstance(ours, float) and math.isclose(theirs, ours, rel_tol=1e-9)):
            yield field, ours, theirs


def _unused(config: ModelConfig, field: str) -> bool:
    """Return True for a setting of a part that the model does not have."""
    table = field.rpartition(".")[0]
    parts = {"moe": config.moe.experts, "mla": config.mla.kv_rank, "delta_net": config.delta_net.key_heads}
    return not parts.get(table, 1)


def _refuse_field(config: ModelConfig, field: str, wanted: object) -> None:
    value = value_of(config, field)
    if {value, wanted} == {"none", "aux"}:  # these two differ only in training
        return
    raise UserError(
        f"model.{field} = {json.dumps(plain(value))} and model.family = {config.family}: "
        f"{family_of(config.family).architecture} computes as with {json.dumps(plain(wanted))}. Choose that, or "
        "another family."
    )


def config_from_json(values: Mapping[str, Any], file: Path | str) -> ModelConfig:
    """Return the `ModelConfig` for the values of a config.json, which were read from `file`. Raises: UserError."""
    _check_kinds(values, ConfigJson, file)
    name = _family(values, file)
    known = FAMILY_OF[name]
    theirs = _keys(known)
    _check_kinds(values, _sizes_of({key: ours for ours, key in theirs.items()}), file)
    written = {known.aliases.get(key, key): value for key, value in values.items() if value is not None}
    given = CONFIG_DEFAULTS | known.defaults | written
    for key in ("num_key_value_heads", "head_dim"):  # null: what follows from the others, not the class's default
        if values.get(key, 0) is None:
            given.pop(key, None)
    if "rope_parameters" in written:
        given["rope_scaling"] = written.get("rope_scaling")
    _refuse_what_differs(values, given, known, file)
    _require(
        ("hidden_size", "num_attention_heads", "num_hidden_layers", theirs["ffn_width"], "vocab_size"), given, file
    )
    given.setdefault("num_key_value_heads", given["num_attention_heads"])
    if "qk_rope_head_dim" in given:
        given["head_dim"] = given["qk_rope_head_dim"]
    given.setdefault("head_dim", given["hidden_size"] // given["num_attention_heads"])
    _require(sorted(theirs.values()), given, file)
    found = {ours: given[key] for ours, key in theirs.items()} | known.fixed
    found |= {ours: rule(given) for ours, rule in known.derived.items()}
    for ours, form in known.converted.items():
        found[ours] = form.read(values[form.key] if form.key in values else given.get(form.key))
    if "intermediate_size" in theirs.values() and "moe.expert_ffn_width" in theirs:
        found["moe.expert_ffn_width"] = given[theirs["moe.expert_ffn_width"]]
    found |= layers_from_json(values, given, known, file)
    try:
        found |= rope_from_json(given, found, known, file)
        found["score"] = _has_score(values)
        return ModelConfig(family=name, **nest({tuple(ours.split(".")): value for ours, value in found.items()}))
    except ValidationError as error:
        raise _refusal(error, theirs | ROPE_KEYS["llama3"] | ROPE_KEYS["yarn"], file) from None


def _require(keys: Iterable[str], given: Mapping[str, Any], file: Path | str) -> None:
    for key in keys:
        if key not in given:
            raise UserError(f"{file}: {key} is missing. Add it, as the model's authors give it.")


class PerLayerJson(BaseModel):
    """The values of one layer in `per_layer_config`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    head_dim: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None


class ConfigJson(BaseModel):
    """Keys read of any config.json beside the fields of `ModelConfig`."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model_type: str | None = None
    architectures: list[str] | None = None
    layer_types: Annotated[list[str], Field(max_length=MOST_LAYERS)] | None = None
    mlp_only_layers: Annotated[list[NonNegativeInt], Field(max_length=MOST_LAYERS)] | None = None
    q_lora_rank: NonNegativeInt | None = None
    sliding_window: NonNegativeInt | None = None
    use_sliding_window: bool | None = None
    max_window_layers: NonNegativeInt | None = None
    # EXAONE 4 has "LLLG" beside layer_types.
    sliding_window_pattern: Annotated[
        PositiveInt, BeforeValidator(lambda value: len(value) if isinstance(value, str) else value),
        Field(le=MOST_LAYERS),
    ] | None = None  # fmt: skip
    no_rope_layers: Annotated[list[int], Field(max_length=MOST_LAYERS)] | None = None
    no_rope_layer_interval: PositiveInt | None = None
    full_attention_interval: Annotated[PositiveInt, Field(le=MOST_LAYERS)] | None = None
    partial_rotary_factor: Annotated[PositiveFloat, Field(le=1.0)] | None = None
    rope_local_base_freq: PositiveFloat | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    query_pre_attn_scalar: PositiveFloat | None = None
    attn_logit_softcapping: PositiveFloat | None = None
    final_logit_softcapping: PositiveFloat | None = None
    logits_scaling: PositiveFloat | None = None
    num_nextn_predict_layers: NonNegativeInt | None = None
    n_group: PositiveInt | None = None
    topk_group: PositiveInt | None = None
    topk_method: str | None = None
    original_max_position_embeddings: Annotated[PositiveFloat, Field(le=2**53)] | None = None
    quantization_config: dict[str, Any] | None = None
    mlp_layer_types: Annotated[list[str], Field(max_length=MOST_LAYERS)] | None = None
    moe_layers: Annotated[list[NonNegativeInt], Field(max_length=MOST_LAYERS)] | None = None
    num_attention_heads_per_layer: Annotated[list[PositiveInt], Field(max_length=MOST_LAYERS)] | None = None
    attention_chunk_size: NonNegativeInt | None = None
    attn_temperature_tuning: bool | None = None
    attn_scale: PositiveFloat | None = None
    gating: bool | str | None = None
    attention_k_eq_v: bool | None = None
    global_head_dim: PositiveInt | None = None
    num_global_key_value_heads: PositiveInt | None = None
    per_layer_config: dict[str, PerLayerJson] | None = None
    rope_theta: PositiveFloat | None = None
    rope_scaling: RopeJson | None = None
    rope_parameters: RopesJson | None = None


def _sizes_of(ours: Mapping[str, str]) -> type[BaseModel]:
    """Return the model of the keys of config.json that are fields of ours, with the limits of these."""
    found = {key: key_fields(ModelConfig)[key_of(name)] for key, name in ours.items()}
    kinds: dict[str, Any] = {
        key: (Annotated[info.annotation, Field(), *info.metadata] | None, None) for key, info in found.items()
    }
    return create_model("SizesJson", __config__=ConfigDict(strict=True, allow_inf_nan=False), **kinds)


def _check_kinds(values: Mapping[str, Any], kinds: type[BaseModel], file: Path | str) -> None:
    """Raise UserError for values that are no numbers, texts or lists where `kinds` has these, or out of bounds."""
    try:
        kinds.model_validate(values)
    except ValidationError as error:
        raise _refusal(error, {}, file) from None


def _refusal(error: ValidationError, theirs: Mapping[str, str], file: Path | str) -> UserError:
    """Return the error that names what is wrong by the keys of config.json; theirs: our field -> their key."""
    found = error.errors(include_url=False)
    lines = [
        f"{file}: {theirs.get(dotted(e['loc']), dotted(e['loc'])) or 'sizes'}: {e['msg'][:200]} "
        f"(config.json says {in_json(e['input']) if e['loc'] else 'otherwise'}). Is the file the authors' own?"
        for e in found[:MOST_PROBLEMS]
    ]
    return UserError("\n".join([*lines, *(["..."] if found[MOST_PROBLEMS:] else [])]))


def _family(values: Mapping[str, Any], file: Path | str) -> str:
    family, classes = values.get("model_type"), values.get("architectures") or []
    known = ", ".join(f"{name} ({its.architecture})" for name, its in FAMILY_OF.items())
    if family not in FAMILY_OF:
        keys = sorted(key for key in values if is_unknown(key, values[key], None))
        which = f"; keys that no known family has: {', '.join(keys)}" if keys else ""
        refuse(file, "model_type", family, f"this architecture is not known{which[:400]}; known are {known}")
    if classes and FAMILY_OF[family].architecture not in classes and not _has_score(values):
        refuse(file, "architectures", classes, f"this architecture is not known; known are {known}")
    return str(family)


def _has_score(values: Mapping[str, Any]) -> bool:
    """Return True for a class of reward models: of one number, not of several labels."""
    labels = values.get("id2label")
    count = len(labels) if isinstance(labels, dict) else values.get("num_labels", 2)
    return count == 1 and SCORED.get(str(values.get("model_type"))) in (values.get("architectures") or ())


def is_unknown(key: str, value: object, family: Family | None) -> bool:
    """Return True for a key that may change what the model computes, and that `family`, or any, does not read."""
    if key in HARMLESS or key.startswith("_") or not value:  # null, false and 0 turn something off
        return False
    return not any(
        key in _keys(its).values()
        or key in its.constants
        or key in its.aliases
        or key in its.defaults
        or any(form.key == key for form in its.converted.values())
        for its in ([family] if family else FAMILY_OF.values())
    )


def _refuse_what_differs(values: Mapping[str, Any], given: Mapping[str, Any], family: Family, file: Path | str) -> None:
    """Raise UserError for keys that make the model compute what our decoder cannot."""
    if "quantization_config" in given:
        check_quantization(given["quantization_config"], file)
    act = given.get(family.act_key, family.hidden_act)
    if act != family.hidden_act and not (family.hidden_act == "gelu_pytorch_tanh" and act == "gelu"):
        refuse(file, family.act_key, act, f"only {family.hidden_act} is known for this class")
    if "mlp_bias" not in _keys(family).values() and given.get("mlp_bias"):
        refuse(file, "mlp_bias", True, "this class has no biases there")
    for key, only in family.constants.items():
        some = only if isinstance(only, tuple) else (only,)
        if given.get(key, some[0]) not in some:
            refuse(file, key, given[key], f"only {' and '.join(map(json.dumps, some))} is known")
    for key, value in values.items():
        if is_unknown(key, value, family):
            refuse(file, key, value, "not known for this class, and it may change what the model computes")
    if family.partial is None and given.get("partial_rotary_factor", 1.0) != 1.0:
        refuse(file, "partial_rotary_factor", given["partial_rotary_factor"], "this class rotates whole heads")
    if "topk_method" in family.defaults:  # DeepSeek-V2
        expected = GROUPED if (values.get("n_group") or 1) > 1 else "greedy"
        if given["topk_method"] not in (expected, GROUPED):
            refuse(file, "topk_method", given["topk_method"], f"only {expected} is known with these groups")
