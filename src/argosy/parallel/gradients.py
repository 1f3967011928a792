"""Arithmetic on gradients: their global norm, squares of a rank's own, fingerprints of bits, and checksums on sums.

The norm is computed in parts that stand around the one exchange of a step (`training.step.Step.exchange`): each rank
adds up the squares of what it holds; all ranks' sums are added; each rank clips its part by the norm.

A sum over ranks keeps checksums: the checksum of the sum is the sum of the checksums (algorithm-based fault tolerance:
Huang & Abraham 1984, "Algorithm-Based Fault Tolerance for Matrix Operations"). In floating point both are rounded, so
an error no larger than rounding cannot be seen: a flip of a low bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from argosy.models.layers import local
from argosy.parallel.pieces import PlacedPiece
from argosy.plan.plan import Plan

SIGMAS = 8
"""Tolerance of a checksum, in standard deviations of rounding."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by bytes of an element."""


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, as 64-bit integers in its elements' order, modulo 2**64; int64, no dims."""
    flat = tensor.detach().reshape(-1)
    per_word = 8 // flat.element_size()
    if flat.storage_offset() % per_word:
        flat = flat.clone()  # or its words would begin elsewhere than those of the other replicas
    in_words = flat.numel() // per_word * per_word
    rest = flat[in_words:].view(INTEGERS[flat.element_size()])
    return flat[:in_words].view(torch.int64).sum() + rest.sum(dtype=torch.int64)


def checksums(rows: Tensor) -> Tensor:
    """Return each row's sum and sum of squares, fp64 [n, 2], of `rows` [n, width]: to be summed over ranks."""
    wide = rows.double()  # at once: reductions that convert on the way are slower
    return torch.stack([wide.sum(dim=1), torch.linalg.vector_norm(wide, dim=1).square()], dim=1)


def is_sum(found: Tensor, expected: Tensor, ranks: int) -> Tensor:
    """Return True if `found` can be the sum over ranks of rows whose checksums add up to `expected` [2]; bool, no dims.

    Rows that are not finite have no checksum: they pass.
    """
    off = found.double().sum() - expected[0]
    return (off.abs() <= tolerance(expected, found.dtype, ranks)) | ~expected.isfinite().all()


def tolerance(expected: Tensor, dtype: torch.dtype, ranks: int) -> Tensor:
    """Return how far the sum of a row that was summed over ranks in `dtype` may be from `expected` [2]; fp64, no dims.

    Rounding each of the n - 1 additions of n ranks, with unit roundoff u, is off by u times a
    partial sum, which is at most sqrt(n) times the root q of the summed squares of the element; over all elements,
    errors being independent, by u n q of the whole row, at most.
    """
    return SIGMAS * torch.finfo(dtype).eps / 2 * ranks * expected[1].sqrt()


def unscale(pieces: Sequence[PlacedPiece], scale: float) -> None:
    """Divide the pieces' gradients by `scale`, that of the loss."""
    if scale != 1.0:
        for piece in pieces:
            if piece.value.grad is not None:
                piece.value.grad /= scale


def square_share(pieces: Sequence[PlacedPiece]) -> Tensor:
    """Return this rank's share of the gradient's squared global norm, fp64, no dims: the shares add up to it.

    It is the squares of what the rank holds, divided by the number of ranks that hold the same.
    """
    share = torch.zeros((), dtype=torch.float64, device=pieces[0].value.device)
    for replicas in sorted({piece.replicas for piece in pieces}):
        gradients = [p.value.grad for p in pieces if p.replicas == replicas and p.value.grad is not None]
        if gradients:
            # As nn.utils.get_total_norm, but in fp32: that function rounds the norms of bf16 gradients to bf16.
            norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
            share += torch.stack(norms).double().square().sum() / replicas
    return share


def clip(pieces: Sequence[PlacedPiece], max_norm: float, norm: float) -> None:
    """Scale the gradients, whose global norm is `norm`, down to a norm of `max_norm` (0: leave them)."""
    if max_norm and pieces:
        # Filled on the device: a number that is copied there makes the host wait for it.
        total = torch.full((), norm, device=pieces[0].value.device)
        # By default torch clips a simulator's tensors one by one, and real ones all at once.
        nn.utils.clip_grads_with_norm_([p.value for p in pieces], max_norm, total, foreach=True)


def has_own_gradients(plan: Plan) -> bool:
    """Return True if each data-parallel rank has the whole gradient of its own samples before any sum."""
    return plan.cp == plan.ep == 1 and not plan.shards_parameters


class LocalSquares:
    """Adds up squares as autograd hands gradients over."""

    def __init__(self) -> None:
        self._at, self._sum = 0, torch.zeros(())
        self._arrivals: dict[int, int] = {}

    def watch(self, pieces: Sequence[PlacedPiece]) -> None:
        """Watch these parameters too. Call it before the rules are made that sum gradients: they free them, and hooks
        of one parameter run in the order in which they were made."""
        for piece in pieces:
            piece.parameter.register_post_accumulate_grad_hook(partial(_tell, weakref.ref(self)))

    def arm(self, at: int, device: torch.device) -> None:
        """Begin a step in which each parameter's gradient is taken after its backward number `at`; 0 takes none."""
        self._at, self._arrivals = at, {}
        self._sum = torch.zeros((), dtype=torch.float64, device=device)

    def take(self) -> Tensor:
        """Return the sum of squares since `arm`, fp64, no dims, and take no more."""
        self._at = 0
        return self._sum

    @torch.no_grad()
    def arrived(self, parameter: Tensor) -> None:
        """Count a gradient of `parameter`."""
        if not self._at or parameter.grad is None:
            return
        count = self._arrivals.get(id(parameter), 0) + 1
        self._arrivals[id(parameter)] = count
        if count == self._at:  # in fp32: the norm of a bf16 gradient would be rounded to bf16
            norm = torch.linalg.vector_norm(local(parameter.grad), dtype=torch.float32)
            self._sum = self._sum + norm.double().square()


def _tell(squares: Callable[[], LocalSquares | None], parameter: Tensor) -> None:
    """Tell of a gradient. The reference is weak: else a parameter would hold itself through autograd."""
    if (alive := squares()) is not None:
        alive.arrived(parameter)
