"""Pieces: this rank's part of each parameter, a plain tensor that the optimizer updates and a checkpoint saves.

However a parameter is split (tensor, expert, ZeRO), what is held is a box of the whole, and knows which.

The norm of all gradients is computed in parts that stand around the one exchange of a step
(`training.step.Step.exchange`): each rank adds up the squares of what it holds; all ranks' sums are added; each rank
clips its part by the norm.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from argosy.models.decoder import Decoder
from argosy.models.initialize import box_of, offset_of
from argosy.models.layers import local
from argosy.models.quantised_weight import QuantisationScheme, QuantisedWeight
from argosy.optim.piece import Piece
from argosy.parallel.mesh import Meshes

if TYPE_CHECKING:  # importing it takes half a second, and a run that splits nothing does without
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, eq=False, kw_only=True)
class PlacedPiece(Piece):
    """A piece, the model's parameter that it is of, and its place in the whole.

    `value` shares the parameter's memory, outside autograd. Its `grad` is set once all ranks' gradients are summed.
    """

    parameter: nn.Parameter
    """The model's own, whose `grad` autograd fills."""
    offset: tuple[int, ...]
    """The place of `value` in the whole."""
    replicas: int
    """Number of ranks of the world that hold this very part."""
    mesh: DeviceMesh | None = None
    """The ranks that share the whole; None if this one has it all."""
    placements: tuple[Placement, ...] = ()
    """Its split, for each dimension of `mesh`."""
    scheme: QuantisationScheme | None = None
    """The way `value` is quantised, if it is: then it is bytes, and so are `shape` and `offset`."""

    @property
    def numbers(self) -> Tensor:
        """`value`, or the numbers that it stands for, fp32."""
        return self.value if self.scheme is None else QuantisedWeight(self.value, self.scheme).float()

    @property
    def place(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """The whole's name, and of `value` within it the offset and the shape."""
        return self.name, self.offset, tuple(self.value.shape)

    @property
    def is_expert(self) -> bool:
        """True for experts that are dealt out over the ep ranks."""
        mesh = getattr(self.parameter, "device_mesh", None)
        return mesh is not None and "ep" in (mesh.mesh_dim_names or ())

    @property
    def is_part_of_sum(self) -> bool:
        """True if the tp ranks hold it whole, and each computes a part of its gradient."""
        mesh = getattr(self.parameter, "device_mesh", None)
        if mesh is None or "tp" not in (mesh.mesh_dim_names or ()):
            return False
        placements: Sequence[Placement] = getattr(self.parameter, "placements", ())
        return placements[-1].is_replicate()


def pieces_of(model: Decoder, meshes: Meshes) -> Iterator[PlacedPiece]:
    """Yield what this rank holds of the parameters of `model`, which has its memory."""
    for name, parameter in model.named_parameters():
        value, shape = local(parameter.detach()), tuple(parameter.shape)
        mesh, placements = getattr(parameter, "device_mesh", None), tuple(getattr(parameter, "placements", ()))
        offset = list(offset_of(parameter))
        # ZeRO 1 and 2 share out what is updated; what is frozen each rank has whole.
        sharing = meshes.sharing(() if mesh is None else mesh.mesh_dim_names) if parameter.requires_grad else None
        if sharing is not None:
            mesh = sharing
            rows = -(-value.shape[0] // mesh.size(-1))
            first = min(mesh.get_local_rank(-1) * rows, value.shape[0])
            value = value[first : first + rows]
            offset[0] += first
            from torch.distributed.tensor import Shard

            placements = (*placements, Shard(0))
        parts = {axis: p.dim for axis, p in enumerate(placements) if isinstance(getattr(p, "dim", None), int)}
        replicas = meshes.ranks_of_stage(is_shared_by_ends=name == "embedding.weight")
        for axis in parts:
            assert mesh is not None
            replicas //= mesh.size(axis)
        yield PlacedPiece(
            name,
            value,
            shape,
            cut=frozenset(dim for axis, dim in parts.items() if mesh is not None and mesh.size(axis) > 1),
            gather=partial(_gather, mesh=mesh, placements=placements, shape=shape, last_first=sharing is not None),
            group=meshes.stage,
            device=value.device,
            scatter=partial(box_of, offset=tuple(offset), shape=value.shape),
            parameter=parameter,
            offset=tuple(offset),
            replicas=replicas,
            mesh=mesh,
            placements=placements,
            scheme=model.schemes.get(name),
        )


def _gather(
    part: Tensor, mesh: DeviceMesh | None, placements: tuple[Placement, ...], shape: tuple[int, ...], last_first: bool
) -> Tensor:
    """Undo the splits one by one, the last one first (`last_first`: that of the last axis of the mesh)."""
    if mesh is None:
        return part
    from torch.distributed.tensor import Replicate

    whole = _wrap(part, mesh, placements, shape)
    axes = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    for axis in reversed(axes) if last_first else axes:
        placements = (*placements[:axis], Replicate(), *placements[axis + 1 :])
        whole = whole.redistribute(placements=placements)
    return whole.to_local()


def _wrap(part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    from torch.distributed.tensor import DTensor

    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)


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
