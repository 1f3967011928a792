"""The kinds of layers in config.json: windows and layers without positions; and rotary embeddings, as versions 4 and 5
of transformers write them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

from argosy.config.attention import RopeScaling
from argosy.config.model import ModelConfig, repeated
from argosy.errors import UserError
from argosy.models.hf_family import Family
from argosy.models.rope import attention_scale

GROUPED = "group_limited_greedy"

T = TypeVar("T")


def layers_from_json(
    values: Mapping[str, Any], given: Mapping[str, Any], family: Family, file: Path | str
) -> dict[str, Any]:
    """Return the fields that say which layers are what. Raises: UserError."""
    layers = given["num_hidden_layers"]
    window = values[family.window_key] if family.window_key in values else given.get(family.window_key)
    theirs = _kinds(values, given, family, file)
    kinds = [family.kinds[kind] for kind in theirs]
    kinds = [kind if kind != family.window_kind or window else "full" for kind in kinds]
    slides = [kind == family.window_kind for kind in kinds]
    found: dict[str, Any] = {}
    if set(kinds) != {"full"}:
        found["attention.layers"] = cycle_of(kinds)
    if any(slides):
        found["attention.window"] = window
    if "delta_net.key_heads" in family.keys and "linear" not in kinds:
        found |= {"delta_net.key_heads": 0, "delta_net.value_heads": 0}
    rotates = [True] * layers
    if family.rotates == "listed":
        interval = given["no_rope_layer_interval"]
        rotates = [bool(flag) for flag in given.get("no_rope_layers") or ()]
        rotates = rotates or [(layer + 1) % interval != 0 for layer in range(layers)]
        _check_length("no_rope_layers", rotates, layers, file)
    elif family.rotates == "sliding" or (family.rotates == "sliding if any" and window):
        rotates = slides
    if not all(rotates):
        found["attention.rotary_layers"] = cycle_of(rotates)
    if "mlp_only_layers" in family.defaults:
        found |= dense_from(sorted(set(given["mlp_only_layers"])))
    if "mlp_layer_types" in family.defaults:
        listed = given["mlp_layer_types"] or ["dense"] + ["sparse"] * (layers - 1)
        _check_length("mlp_layer_types", listed, layers, file)
        if unknown := set(listed) - {"dense", "sparse"}:
            refuse(file, "mlp_layer_types", unknown.pop(), "known are dense and sparse")
        found |= dense_from([layer for layer, kind in enumerate(listed) if kind == "dense"])
    if family.by_layer is not None:
        try:
            found |= family.by_layer(given, theirs)
        except ValueError as error:
            raise UserError(f"{file}: {error}. Choose another model.") from None
    return found


def dense_from(dense: Sequence[int]) -> dict[str, Any]:
    """Return the fields that say which layers have no experts."""
    first = next((i for i, layer in enumerate(dense) if layer != i), len(dense))
    return {"moe.first_dense_layers": first, "moe.dense_layers": tuple(dense[first:])}


def _kinds(values: Mapping[str, Any], given: Mapping[str, Any], family: Family, file: Path | str) -> Sequence[str]:
    """Return the kind of each layer, in their words."""
    layers, listed = given["num_hidden_layers"], values.get("layer_types")
    for kind in listed or ():
        if kind not in family.kinds:
            refuse(file, "layer_types", kind, f"known for this class are {', '.join(family.kinds)}")
    if family.windows is None:
        if given.get("use_sliding_window"):
            refuse(file, "use_sliding_window", True, "this class's attention reads the whole document")
        return ["full_attention"] * layers
    if listed is None and "use_sliding_window" not in family.defaults and given.get("use_sliding_window"):
        refuse(file, "use_sliding_window", True, "layer_types must say which layers have windows")
    if listed is None and isinstance(pattern := given.get("sliding_window_pattern"), str):
        refuse(file, "sliding_window_pattern", pattern, "layer_types must say which layers have windows")
    kinds = listed if listed and family.lists_layers else family.windows(given, layers)
    _check_length("layer_types", kinds, layers, file)
    return kinds


def _check_length(key: str, found: Sequence[object], layers: int, file: Path | str) -> None:
    if len(found) != layers:
        refuse(file, key, list(found), f"it must have {layers} entries, as num_hidden_layers says")


def layers_to_json(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the keys that `layers_from_json` reads."""
    attention, layers = config.attention, range(config.layers)
    values: dict[str, Any] = {}
    kinds = [repeated(attention.layers, i, "full") for i in layers]
    theirs = {ours: name for name, ours in family.kinds.items()}
    if unknown := set(kinds) - set(theirs):
        raise UserError(
            f"model.attention.layers has {unknown.pop()} ones and model.family = {config.family}: "
            f"{family.architecture} knows {', '.join(theirs)}. Choose another family."
        )
    if family.windows is not None:
        if family.window_kind in theirs:
            may_be_null = family.rotates == "sliding if any" or "use_sliding_window" in family.defaults
            usual = None if may_be_null or not family.lists_layers else family.defaults.get(family.window_key)
            values[family.window_key] = attention.window or usual
        if family.lists_layers:
            values["layer_types"] = [theirs[kind] for kind in kinds]
        if family.defaults.get("use_sliding_window") is not None:
            values |= {"use_sliding_window": bool(attention.window), "max_window_layers": config.layers}
    if family.rotates == "listed":
        values["no_rope_layers"] = [int(repeated(attention.rotary_layers, i, True)) for i in layers]
    if "topk_method" in family.defaults:
        values["topk_method"] = GROUPED if config.moe.groups > 1 else "greedy"
    if "mlp_only_layers" in family.defaults:
        values["mlp_only_layers"] = [*range(config.moe.first_dense_layers), *config.moe.dense_layers]
    if "mlp_layer_types" in family.defaults:
        values["mlp_layer_types"] = ["sparse" if config.is_moe_layer(i) else "dense" for i in layers]
    if family.partial is not None and not family.nests_rope:
        values["partial_rotary_factor"] = share_of(attention.rotary_width or config.head_width, config.head_width)
    return values if family.written is None else values | family.written(config)


def share_of(part: int, whole: int) -> float:
    """Return the share that gives `part` again when the product is cut off."""
    share = part / whole
    return share if int(whole * share) == part else math.nextafter(share, 1.0)


def cycle_of(values: Sequence[T]) -> tuple[T, ...]:
    """Return the shortest beginning of `values` that gives all of them when it is repeated, twice or oftener; else all
    of them."""
    for length in range(1, len(values) // 2 + 1):
        if all(value == values[i % length] for i, value in enumerate(values)):
            return tuple(values[:length])
    return tuple(values)


def plain(value: Any) -> Any:
    """Return a value as JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value


def in_json(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 100 else f"{text[:97]}..."


def refuse(file: Path | str, key: str, value: object, why: str) -> NoReturn:
    """Raise the UserError for something in a folder that we cannot use."""
    raise UserError(f"{file}: {key[:100]} = {in_json(value)}: {why}. Choose another model.")


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
    "longrope": {
        "factor": "factor",
        "original_max_seq_len": "original_max_position_embeddings",
        "short_divisors": "short_factor",
        "long_divisors": "long_factor",
    },
    "proportional": {"factor": "factor", "rotated_share": "partial_rotary_factor"},
}
"""`RopeScaling.kind` -> its fields -> their keys. Their name for "none" is "default"."""

MLA_YARN = ("mscale", "mscale_all_dim")
"""DeepSeek's keys of YaRN's temperature. If both are equal, the whole head has it, as in `models.mla`."""


class RopeJson(BaseModel):
    """Keys read of the rotary embedding; null stands for what is missing."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    rope_type: str | None = None
    type: str | None = None
    rope_theta: PositiveFloat | None = None
    factor: PositiveFloat | None = None
    alpha: Annotated[PositiveFloat, Field(le=2**20)] | None = None
    original_max_position_embeddings: Annotated[PositiveFloat, Field(le=2**53)] | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    beta_fast: PositiveFloat | None = None
    beta_slow: PositiveFloat | None = None
    attention_factor: PositiveFloat | None = None
    partial_rotary_factor: PositiveFloat | None = None
    truncate: bool | None = None
    mscale: PositiveFloat | None = None
    mscale_all_dim: PositiveFloat | None = None
    short_factor: Annotated[list[PositiveFloat], Field(max_length=2**14)] | None = None
    long_factor: Annotated[list[PositiveFloat], Field(max_length=2**14)] | None = None


class RopesJson(RopeJson):
    """As `RopeJson`, or one for each kind of layer."""

    full_attention: RopeJson | None = None
    sliding_attention: RopeJson | None = None


def rope_to_json(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the keys that `rope_from_json` reads."""
    scaling = config.rope_scaling
    rope: dict[str, Any] = {theirs: plain(getattr(scaling, ours)) for ours, theirs in ROPE_KEYS[scaling.kind].items()}
    if scaling.kind == "yarn" and config.mla.kv_rank:
        given = scaling.attention_factor
        temperature = (given - 1) / (0.1 * math.log(scaling.factor)) if given and scaling.factor > 1 else 1.0
        rope |= dict.fromkeys(MLA_YARN, temperature)
    elif scaling.kind in ("yarn", "longrope") and scaling.attention_factor:
        rope["attention_factor"] = scaling.attention_factor
    if scaling.kind == "yarn" and not scaling.truncate:
        rope["truncate"] = False
    scaled = {"rope_type": scaling.kind, **rope} if rope else None
    # transformers 4 reads only these two keys, and 5 reads them as well as its own `rope_parameters`.
    values: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_scaling": scaled}
    if scaled is None and "rope_scaling" in family.defaults:  # which would stand in for nothing
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if family.nests_rope:
        full = {"rope_theta": config.rope_theta, **(scaled or {"rope_type": "default"})}
        sliding: dict[str, Any] = dict(full) if config.attention.sliding_rope_scaled else {"rope_type": "default"}
        sliding["rope_theta"] = config.attention.sliding_rope_theta or config.rope_theta
        if family.partial is not None:
            whole, width = config.head_width, config.attention.rotary_width or config.head_width
            full["partial_rotary_factor"] = share_of(width, whole)
            sliding["partial_rotary_factor"] = share_of(config.attention.sliding_rotary_width or width, whole)
        both = {"full_attention": full, "sliding_attention": sliding}
        if "rope_parameters" in family.defaults:  # a class of transformers 5, which takes the other keys for these
            return {"rope_parameters": both}
        values["rope_parameters"] = both
        values["rope_local_base_freq"] = sliding["rope_theta"]
    return values


def rope_from_json(
    given: Mapping[str, Any], found: Mapping[str, Any], family: Family, file: Path | str
) -> dict[str, Any]:
    """Return the fields of the rotary embeddings, from the keys of either version."""
    section = "rope_parameters" if given.get("rope_parameters") else "rope_scaling"
    if given.get("rope_scaling") and not (family.nests_rope and given.get("rope_parameters")):
        section = "rope_scaling"
    rope = {key: value for key, value in (given.get(section) or {}).items() if value is not None}
    rope = {key: value for key, value in rope.items() if key not in family.rope_of_pictures}
    kind, width = rope.get("rope_type", rope.get("type")), found["head_width"]
    if family.stretches_base and kind == "dynamic" and "alpha" in rope and width > 2:
        rope = {"rope_theta": rope.get("rope_theta", given["rope_theta"]) * rope["alpha"] ** (width / (width - 2))}
    sliding = None
    if family.nests_rope and "full_attention" in rope:
        sliding = rope.get("sliding_attention") or {}
        rope = rope["full_attention"]
        section += ".full_attention"
    theta, scaling, partial = _one_rope(rope, given, bool(found.get("mla.kv_rank")), section, file)
    if family.ropes and scaling["kind"] not in family.ropes:
        refuse(file, f"{section}.rope_type", scaling["kind"], f"this class takes {' and '.join(family.ropes)} alone")
    values: dict[str, Any] = {"rope_theta": theta, "rope_scaling": RopeScaling.model_validate(scaling)}
    partial = partial or given.get("partial_rotary_factor", family.partial) or 1.0
    if partial != 1.0 and family.partial is None:
        refuse(file, f"{section}.partial_rotary_factor", partial, "this class rotates whole heads")
    if partial != 1.0:
        values["attention.rotary_width"] = int(found["head_width"] * partial)
    if family.nests_rope:
        if sliding is None:
            sliding = {"rope_theta": given.get("rope_local_base_freq", family.sliding_theta or theta)}
            sliding |= {} if family.sliding_theta or not scaling else {"rope_type": "default"}
        own_theta = sliding.get("rope_theta", given.get("rope_local_base_freq", family.sliding_theta or theta))
        own, own_scaling, own_partial = _one_rope(
            {k: v for k, v in sliding.items() if v is not None} | {"rope_theta": own_theta}, given, False,
            "rope_parameters.sliding_attention", file,
        )  # fmt: skip
        if own_scaling["kind"] != "none" and own_scaling != scaling:
            refuse(file, "rope_parameters.sliding_attention", sliding, "only none or that of full layers is known")
        has_windows = bool(found.get("attention.layers"))
        own_partial = own_partial or given.get("partial_rotary_factor", family.partial) or 1.0
        if has_windows and own_partial != partial and family.partial is not None:
            values["attention.sliding_rotary_width"] = int(found["head_width"] * own_partial)
        if has_windows and own != theta:
            values["attention.sliding_rope_theta"] = own
        if has_windows and scaling["kind"] != "none" and own_scaling["kind"] == "none":
            values["attention.sliding_rope_scaled"] = False
    return values


def _one_rope(
    rope: dict[str, Any], given: Mapping[str, Any], is_latent: bool, section: str, file: Path | str
) -> tuple[float, dict[str, Any], float | None]:
    """Return the base, the fields of `RopeScaling` and the rotated share of one rotary embedding."""
    rope = dict(rope)
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    theta, partial = rope.pop("rope_theta", given["rope_theta"]), rope.pop("partial_rotary_factor", None)
    kind = {"default": "none", "su": "longrope"}.get(kind, kind)  # su: of Phi-3 before it had a name
    if kind not in ROPE_KEYS:
        known = ", ".join(["default", *(name for name in ROPE_KEYS if name != "none")])
        refuse(file, f"{section}.rope_type", kind, f"known are {known}")
    if kind == "proportional":  # a share of the frequencies, not of the head
        rope |= {"partial_rotary_factor": partial or 1.0, "factor": rope.get("factor", 1.0)}
        partial = 1.0
    keys = ROPE_KEYS[kind]
    if "original_max_seq_len" in keys:
        original = given.get("original_max_position_embeddings", given["max_position_embeddings"])
        rope.setdefault("original_max_position_embeddings", original)
    scaling: dict[str, Any] = {"kind": kind} | {
        ours: rope.pop(theirs) for ours, theirs in keys.items() if theirs in rope
    }
    if kind in ("yarn", "longrope"):
        scaling.setdefault("factor", given["max_position_embeddings"] / scaling["original_max_seq_len"])
    for ours in ("factor", "low_freq_factor", "high_freq_factor", "short_divisors", "long_divisors"):
        if ours in keys and ours not in scaling:
            raise UserError(f"{file}: {section}.{keys[ours]} is missing, and {kind} needs it. Add it.")
    if kind in ("yarn", "longrope"):
        if kind == "yarn" and rope.pop("truncate", True) is False:
            scaling["truncate"] = False
        usual = attention_scale(RopeScaling.model_validate(scaling))
        factor = rope.pop("attention_factor", usual)
        if is_latent and kind == "yarn":
            both = [rope.pop(key, None) for key in MLA_YARN]
            if both[0] is None or both[0] != both[1]:
                refuse(file, f"{section}.{MLA_YARN[both[0] is not None]}", both[1], "both must be there, and alike")
            factor = 0.1 * both[0] * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0
        if not math.isclose(factor, usual, rel_tol=1e-6):
            scaling["attention_factor"] = factor
    for key, value in rope.items():
        refuse(file, f"{section}.{key}", value, "not known")
    return theta, scaling, partial
