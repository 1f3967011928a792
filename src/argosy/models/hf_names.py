"""The weights of Hugging Face folders in our terms: what becomes what, tensor by tensor, in both directions.

A `Conversion` is the smallest group that converts by itself: two tensors, a stack of experts and its slices, or
queries, keys and values and their fused matrix. Import and export take one at a time, or some of its rows: no more is
in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from argosy.config.model import ModelConfig
from argosy.errors import UserError
from argosy.models.hf_families import family_of
from argosy.models.hf_family import TENSOR_NAMES, FusedTensor, value_of
from argosy.plan.layer_spec import RopeSpec, layer_spec
from argosy.plan.parameters import state_table

Convert = Callable[[Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Conversion:
    """Weights that convert together."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    to_theirs: Convert
    """They share memory with ours where they can."""
    to_ours: Convert
    rows: Literal["together", "alone", "theirs"] = "together"
    """alone: any rows of theirs, of the first dim, convert to the same rows of ours; theirs: each row of ours is a
    tensor of theirs; together: neither."""


def conversions_of(config: ModelConfig) -> list[Conversion]:
    """Return the conversions of all weights of a model, in its order."""
    family = family_of(config.family)
    fused = {ours: (theirs, rule) for theirs, rule in family.fused.items() for ours in rule.ours}
    shapes = {name: parameter.shape for name, parameter in state_table(config).items()}
    conversions, done = [], set[str]()
    for name in shapes:
        block = name.split(".")[1] if name.startswith(("blocks.", "mtp.")) else ""
        pattern = name.replace(f".{block}.", ".*.", 1) if block else name
        module, _, kind = pattern.rpartition(".")
        if name in done:
            continue
        found = fused.get(pattern) or fused.get(module)
        if found is not None:
            theirs, rule = found
            is_whole = pattern in rule.ours
            ours = tuple((p if is_whole else f"{p}.{kind}").replace("*", block) for p in rule.ours)
            sizes = [shapes[n] for n in ours]
            orders = [_rotary_order(n, config) for n in ours]
            their_name = (theirs if is_whole else f"{theirs}.{kind}").replace("*", block)
            heads = value_of(config, rule.heads) if rule.heads else 1
            conversions.append(_fused(ours, their_name, rule, sizes, orders, heads))
            done.update(ours)
        else:
            conversions.append(_with_copies(_single(name, pattern, block, config), config))
    return conversions


def their_shapes(conversion: Conversion, shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the shapes of their tensors, from those of ours."""
    whole = [torch.empty(shapes[name], device="meta") for name in conversion.ours]
    return [tuple(tensor.shape) for tensor in conversion.to_theirs(whole)]


def _single(name: str, pattern: str, block: str, config: ModelConfig) -> Conversion:
    names = TENSOR_NAMES | family_of(config.family).names
    if pattern in names and "#" in names[pattern]:  # a stack of experts, which they store one by one
        theirs = names[pattern].replace("*", block)
        slices = tuple(theirs.replace("#", str(expert)) for expert in range(config.moe.experts))
        return Conversion(
            (name,), slices, lambda ours: list(ours[0].unbind()), lambda parts: [torch.stack(list(parts))], "theirs"
        )
    if pattern in names:
        theirs = names[pattern].replace("*", block)
    else:
        module, _, kind = pattern.rpartition(".")
        theirs = f"{names[module].replace('*', block)}.{kind}"
    if (order := _rotary_order(name, config)) is None:
        return Conversion((name,), (theirs,), list, list, "alone")
    back = order.argsort()
    return Conversion((name,), (theirs,), lambda ours: [ours[0][back]], lambda parts: [parts[0][order]], "together")


def copies_of(name: str, config: ModelConfig) -> tuple[str, ...]:
    """Return their names of the copies that modules of multi-token prediction have of one of our weights."""
    pattern = family_of(config.family).copies.get(name, "")
    return tuple(pattern.replace("*", str(layer)) for layer in range(config.layers, config.all_layers) if pattern)


def _with_copies(conversion: Conversion, config: ModelConfig) -> Conversion:
    (ours,), (theirs,) = conversion.ours, conversion.theirs[:1]
    if not (copies := copies_of(ours, config)):
        return conversion

    def join(weights: Sequence[Tensor]) -> list[Tensor]:
        return conversion.to_theirs(weights) * (1 + len(copies))

    def cut(parts: Sequence[Tensor]) -> list[Tensor]:
        for name, copy in zip(copies, parts[1:], strict=True):
            if not torch.equal(copy, parts[0]):
                raise UserError(
                    f"{name} is not {theirs}: modules that predict further tokens share it with the model here. Set "
                    "num_nextn_predict_layers = 0 in config.json and leave their weights out."
                )
        return conversion.to_ours(parts[:1])

    return Conversion(conversion.ours, (theirs, *copies), join, cut)


def _fused(
    ours: tuple[str, ...],
    theirs: str,
    rule: FusedTensor,
    shapes: Sequence[tuple[int, ...]],
    orders: Sequence[Tensor | None],
    heads: int,
) -> Conversion:
    """Return the conversion of weights that they store as one tensor."""

    def join(weights: Sequence[Tensor]) -> list[Tensor]:
        weights = [w if order is None else w[order.argsort()] for w, order in zip(weights, orders, strict=True)]
        if rule.kind == "rows":
            return [torch.cat(list(weights))]
        if rule.kind in ("expert_rows", "expert_columns"):
            whole = torch.cat(list(weights), 1)
            return [whole if rule.kind == "expert_rows" else whole.transpose(1, 2).contiguous()]
        if rule.kind == "head_rows":
            return [torch.cat([weight.unflatten(0, (heads, -1)) for weight in weights], 1).flatten(0, 1)]
        joined = torch.stack(list(weights), 2).flatten(1, 2) if len(weights) > 1 else weights[0]
        return [joined.transpose(1, 2).contiguous() if joined.ndim > 2 else joined]

    def cut(parts: Sequence[Tensor]) -> list[Tensor]:
        (whole,) = parts
        if rule.kind == "rows":
            weights = list(whole.split([shape[0] for shape in shapes]))
        elif rule.kind in ("expert_rows", "expert_columns"):
            whole = whole if rule.kind == "expert_rows" else whole.transpose(1, 2)
            weights = list(whole.split([shape[1] for shape in shapes], 1))
        elif rule.kind == "head_rows":
            by_head = whole.unflatten(0, (heads, -1)).split([shape[0] // heads for shape in shapes], 1)
            weights = [weight.flatten(0, 1) for weight in by_head]
        else:
            whole = whole.transpose(1, 2) if whole.ndim > 2 else whole
            weights = list(whole.unflatten(1, (-1, len(shapes))).unbind(2)) if len(shapes) > 1 else [whole]
        return [w.contiguous() if order is None else w[order] for w, order in zip(weights, orders, strict=True)]

    rows: Literal["together", "alone"] = "together" if rule.kind in ("rows", "head_rows") else "alone"
    return Conversion(ours, (theirs,), join, cut, rows)


def _rotary_order(name: str, config: ModelConfig) -> Tensor | None:
    """Return the places of our rows of a weight or bias among theirs; None if the order is the same.

    Some classes keep the two rows of a rotary pair side by side; we keep them in two halves. This concerns queries and
    keys, and what shares their order.
    """
    if family_of(config.family).rotary == "halves":
        return None
    mla, module = config.mla, name.rpartition(".")[0].rpartition(".")[2]
    if mla.kv_rank and module == "kv_down":
        return torch.cat((torch.arange(mla.kv_rank), mla.kv_rank + _halves(mla.rope_width)))
    if mla.kv_rank and module in ("q", "q_up"):
        head = torch.cat((torch.arange(mla.nope_width), mla.nope_width + _halves(mla.rope_width)))
        return (torch.arange(config.heads)[:, None] * mla.key_width + head).flatten()
    if mla.kv_rank or module not in ("q", "k"):
        return None
    spec = layer_spec(config, int(name.split(".")[1]))
    width = spec.places.width if isinstance(spec.places, RopeSpec) else 0
    head = torch.cat((_halves(width), torch.arange(width, spec.head_width)))
    heads = spec.heads if module == "q" else spec.kv_heads
    return (torch.arange(heads)[:, None] * spec.head_width + head).flatten()


def _halves(width: int) -> Tensor:
    return torch.arange(width).view(-1, 2).T.flatten()
