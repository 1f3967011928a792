"""The kinds of layers in config.json: windows, and layers without positions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from argosy.config.model import ModelConfig, repeated
from argosy.errors import UserError
from argosy.models.hf_family import Family

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
    elif family.rotates == "sliding" or (family.rotates == "sliding if any" and any(slides)):
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
            values[family.window_key] = attention.window or None
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
