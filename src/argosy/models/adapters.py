"""Low-rank adapters (LoRA, Hu et al. 2021; DoRA, Liu et al. 2024): beside the frozen weights of linear layers and of
experts, by the table of parameters (`plan.parameters.adapter_table`). Those weights may be quantised (`lora.base`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from argosy.config.train import LoraConfig
from argosy.matmul import dense
from argosy.models.decoder import Block, Decoder
from argosy.models.dropout import AdapterDropout, salt_of
from argosy.models.experts import Experts
from argosy.models.initialize import offset_of
from argosy.models.layers import Linear, itself, local
from argosy.models.mtp import PredictionModule
from argosy.models.quantised_weight import Product, QuantisationScheme, QuantisedWeight, multiply
from argosy.plan.parameters import Table, adapter_of, inside

# M inputs, N outputs, r rank; experts have one more dim in front

ADAPTER_PARTS = ("a", "b", "magnitude")
"""The parts of an adapter, by their names in the table: inner and outer matrix, and what only DoRA has."""
Spread = Callable[[Tensor], Tensor]
"""Numbers of each output [N], or of each expert's [e, N] -> what the rows are multiplied by."""


class LowRank(nn.Module):
    """The adapter of one weight: W x + scale B A x, with DoRA times the lengths that it has trained.

    DoRA's output is W' x (m / |W'|) with W' = W + scale B A, by output; |W'| counts as a constant in backward (Liu et
    al. 2024, section 4.3). The table's `magnitude` is m - |W|.
    """

    sum_squares: Callable[[Tensor], Tensor] | None = None
    """Sums over ranks. Tensor parallelism sets it where each rank has some of the inputs."""
    first_input: int = 0
    """The first of the inputs that this rank has."""

    def __init__(self, table: Table, scale: float, dropout: AdapterDropout | None, salt: int):
        """`dropout`: that of the block; `salt`: tells its adapters apart."""
        super().__init__()
        self.a = nn.Parameter(torch.empty(table["a"].shape))
        self.b = nn.Parameter(torch.empty(table["b"].shape))
        self.magnitude = nn.Parameter(torch.empty(table["magnitude"].shape)) if "magnitude" in table else None
        self.scale, self.dropout, self.salt = scale, dropout, salt

    def forward(
        self, x: Tensor, weight: Tensor | QuantisedWeight, product: Product = dense, each: Spread = itself
    ) -> Tensor:
        """Return what the layer computes, without a bias; `weight` is this rank's part. Of experts, `each` gives every
        row what its expert has."""
        a, b = local(self.a), local(self.b)
        kept = x if self.dropout is None else self.dropout.of(x, self.salt, self.first_input)
        plain, added = multiply(x, weight, product), product(product(kept, a.to(x.dtype)), b.to(x.dtype)) * self.scale
        if self.magnitude is None:
            return plain + added
        with torch.no_grad():
            length, begun = lengths(weight, a, b, self.scale, self.sum_squares)
        growth = (begun + local(self.magnitude).float()) / length
        factor = each(growth.to(x.dtype))
        if kept is x:
            return (plain + added) * factor
        # As PEFT: what the lengths add is computed from the inputs that are left, what was there before from all.
        return plain + multiply(kept, weight, product) * (factor - 1) + added * factor


def lengths(
    weight: Tensor | QuantisedWeight,
    a: Tensor,
    b: Tensor,
    scale: float,
    sum_squares: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the lengths of the rows of W + scale B A, and of W; fp32 [N], without making the sum.

    |w + s b A|^2 = |w|^2 + 2 s (w A^T) b + s^2 b (A A^T) b: two narrow products in place of a matrix as large as W.
    """
    w, a, b = weight.float(), a.float(), b.float()
    squares = w.square().sum(-1)
    crossed = ((w @ a.mT) * b).sum(-1)
    added = ((b @ (a @ a.mT)) * b).sum(-1)
    both = torch.stack((squares + 2 * scale * crossed + scale**2 * added, squares))
    if sum_squares is not None:
        both = sum_squares(both)
    grown, begun = both.sqrt().unbind()
    return grown, begun


def merged(weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor | None, scale: float) -> Tensor:
    """Return the weight that computes the same without the adapter, in the weight's dtype: W + scale B A, and with
    DoRA's `magnitude` (m - |W|) each row as long as m."""
    wide = weight.float()
    whole = wide + scale * (b.float() @ a.float())
    if magnitude is not None:
        grown = (wide.norm(dim=-1) + magnitude.float()) / whole.norm(dim=-1)
        whole = whole * grown.unsqueeze(-1)
    return whole.to(weight.dtype)


def add_adapters(model: Decoder, table: Table, lora: LoraConfig) -> None:
    """Give the weights of `model` (on the meta device) the adapters that `table` has of them, in place."""
    for name in table:
        adapter = adapter_of(name)
        if f"{adapter}.a" not in table:
            continue
        kind, layer, place = adapter.split(".", 2)
        part = model.get_submodule(f"{kind}.{layer}")
        assert isinstance(part, Block | PredictionModule)
        if lora.dropout and part.dropout is None:
            part.dropout = AdapterDropout(lora.dropout)
        owner, _, last = adapter.rpartition(".")
        with torch.device("meta"):
            low_rank = LowRank(inside(table, adapter), lora.scale, part.dropout, salt_of(place))
        model.get_submodule(owner).add_module(last, low_rank)


def quantise(model: Decoder, lora: LoraConfig) -> None:
    """Let the frozen matrices of linear layers and of experts be bytes, in place; `model` is on the meta device, and
    tensor and expert parallelism have cut it.

    ZeRO cuts rows of bytes as it cuts rows of numbers.
    """
    for name, parameter in list(model.named_parameters()):
        if not model.table[name].is_linear:
            continue
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        scheme = model.schemes[name] = _scheme_of(parameter, lora)
        module.register_parameter(own, _bytes_for(parameter, scheme))
        if isinstance(module, Experts):
            module.schemes[own] = scheme
        else:
            assert isinstance(module, Linear), name
            module.scheme = scheme


def _scheme_of(parameter: Tensor, lora: LoraConfig) -> QuantisationScheme:
    ranks = _ranks_over_columns(parameter)
    return QuantisationScheme(lora, local(parameter).shape[-1], offset_of(parameter)[-1], parameter.shape[-1], ranks)


def _ranks_over_columns(parameter: Tensor) -> int:
    """Return how many ranks share the last dim."""
    ranks, last = 1, parameter.ndim - 1
    for axis, placement in enumerate(getattr(parameter, "placements", ())):
        if getattr(placement, "dim", None) == last:
            ranks *= parameter.device_mesh.size(axis)  # type: ignore[attr-defined]
    return ranks


def _bytes_for(parameter: Tensor, scheme: QuantisationScheme) -> nn.Parameter:
    """Return the parameter of bytes in place of one of numbers, cut alike."""
    part = torch.empty(*local(parameter).shape[:-1], scheme.row_bytes, dtype=torch.uint8, device=parameter.device)
    if not hasattr(parameter, "to_local"):
        return nn.Parameter(part, requires_grad=False)
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*parameter.shape[:-1], scheme.row_bytes * _ranks_over_columns(parameter)))
    strides = torch.empty(shape, device="meta").stride()
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    whole = DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=strides)
    return nn.Parameter(whole, requires_grad=False)
