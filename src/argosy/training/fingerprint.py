"""Fingerprints against silent corruption: replicas must be equal bit by bit; one that differs is found and healed.

Each tensor's fingerprint is the sum of its bits, read as 64-bit integers and wrapping: it runs at the speed of memory,
does not depend on the order of summation, and any one flipped bit changes it (two cancel only if the same bit of two
words flips in opposite directions). Fingerprints of a rank are weighted such that those of equal replicas add up to 0
over all ranks, so that one number in the step's exchange tells all ranks at once whether any replica differs. Only then
are they compared one by one.

Weights and optimizer state that a single rank holds cannot be checked like that.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from argosy.accelerator import sent_to
from argosy.data.order import key_of
from argosy.errors import RunFailed
from argosy.models.layers import local
from argosy.optim.optimizer import Optimizer
from argosy.parallel.buckets import sum_of_bits
from argosy.parallel.mesh import Meshes
from argosy.parallel.model import ParallelModel
from argosy.parallel.pieces import PlacedPiece
from argosy.parallel.world import World

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

LIMBS, LIMB_BITS = 4, 16
"""A 64-bit fingerprint travels as this many numbers of this many bits, which fp64 adds up exactly in any world."""

Key = tuple[int, tuple[str, ...]]
StateOf = Callable[[str], Mapping[str, Tensor]]
T = TypeVar("T")


@dataclass(frozen=True)
class Holders:
    """Ranks that hold the same part of a tensor. Ranks of one place in the layout share all their parts."""

    ranks: tuple[int, ...]
    """Ascending."""
    split: tuple[str, ...]
    """Axes that the whole is split over; with the first rank, they tell these holders from all others."""

    @property
    def key(self) -> Key:
        """A short name, equal on all of the ranks."""
        return self.ranks[0], self.split


@dataclass(frozen=True)
class Replica:
    """This rank's replica of a tensor that other ranks hold too."""

    name: str
    tensor: Tensor
    holders: Holders


@dataclass(frozen=True)
class Corruption:
    """A tensor whose replicas differ."""

    name: str
    ranks: tuple[int, ...]
    """Ranks that differ from the majority; without a majority, all holders: one of them is wrong."""
    healthy: int | None
    """A rank of the majority; None without one."""
    fingerprint: int
    """The majority's."""


class Fingerprints:
    """Compares the replicas of weights and optimizer state that ranks hold."""

    def __init__(self, model: ParallelModel, optimizer: Optimizer, world: World, outer: StateOf | None):
        """outer(parameter): what the outer optimizer of a run with sites keeps of it, laid out as its master weights.

        It changes in outer steps only, but memory is corrupted at any time.
        """
        self._model, self._optimizer, self._world, self._outer = model, optimizer, world, outer
        self._everyone = _holders(model.meshes, None, ())
        self._held: list[tuple[PlacedPiece, PlacedPiece | None, Holders, Holders]] = []
        frozen = ((piece, None) for piece in model.frozen)
        for piece, master in (*zip(model.pieces, model.masters, strict=True), *frozen):
            mesh = getattr(piece.parameter, "device_mesh", None)
            whole = _holders(model.meshes, mesh, getattr(piece.parameter, "placements", ()))
            self._held.append((piece, master, whole, _holders(model.meshes, piece.mesh, piece.placements)))
        self._names: tuple[str, ...] = ()
        self._factors = torch.empty(0)

    def share(self) -> Tensor | None:
        """Return this rank's share of a sum over all ranks; the sum is 0 modulo 2**64 if all replicas are equal.

        int64, no dims; the host waits for nothing. None if no other rank has what this one has.
        """
        self._model.settle()
        replicas = list(self.replicas())
        if not replicas:
            return None
        names = tuple(replica.name for replica in replicas)
        if names != self._names:  # once at the start, and once when the first update has made the moments
            self._names = names
            factors = torch.tensor([self._factor(replica) for replica in replicas])
            self._factors = sent_to(self._world.device, factors)
        return (_mixed(self._sums(replicas)) * self._factors).sum()

    def differ(self) -> bool:
        """True if any replicas differ; all ranks call it together, and get the same answer."""
        return is_nonzero(self._world.sum(limbs_of(self.share(), self._world.device)).tolist())

    def find(self) -> list[Corruption]:
        """Return the tensors whose replicas differ, the same on all ranks, which call it together."""
        replicas = list(self.replicas())
        names = (replica.name for replica in replicas)
        sums = dict(zip(names, self._sums(replicas).tolist(), strict=True)) if replicas else {}
        by_holders: dict[Key, dict[str, int]] = defaultdict(dict)
        for replica in replicas:
            by_holders[replica.holders.key][replica.name] = sums[replica.name]
        mine = [(key, key_of(repr(sorted(some.items())))) for key, some in by_holders.items()]
        of_all = [dict(said) for said in self._world.gather(mine, list[tuple[Key, int]])]
        suspect = _differing(of_all)
        asked = [(key, some) for key, some in by_holders.items() if key in suspect]
        detail = [dict(said) for said in self._world.gather(asked, list[tuple[Key, dict[str, int]]])]
        found = []
        for key in sorted(suspect):
            held = {rank: some[key] for rank, some in enumerate(detail) if key in some}
            for name in sorted(next(iter(held.values()))):
                found += _compared(name, {rank: some[name] for rank, some in held.items()})
        return found

    def heal(self, corruptions: Sequence[Corruption]) -> None:
        """Copy corrupt tensors from a healthy rank; all ranks call it alike, and each tensor must have a majority.

        Raises: RunFailed if a tensor still differs from the majority when it has arrived.
        """
        mine = {replica.name: replica.tensor for replica in self.replicas()}
        me, device = self._world.rank, self._world.device
        for corrupt in corruptions:
            assert corrupt.healthy is not None
            for rank in corrupt.ranks:
                if me == corrupt.healthy:
                    dist.send(mine[corrupt.name].contiguous().to(device), rank)
                elif me == rank:
                    arrived = torch.empty_like(mine[corrupt.name], device=device).contiguous()
                    dist.recv(arrived, corrupt.healthy)
                    mine[corrupt.name].copy_(arrived)
                    if int(sum_of_bits(mine[corrupt.name])) != corrupt.fingerprint:
                        raise RunFailed(
                            f"{corrupt.name} on rank {me} is corrupt, and what came from rank {corrupt.healthy} in its "
                            "place is not what was sent. Take this machine out, and run the same command again."
                        )
        with torch.no_grad():
            self._model.after_update()

    def replicas(self) -> Iterator[Replica]:
        """Yield what this rank holds that others hold too, in an order that all holders share."""
        for piece, master, whole, part in self._held:
            if len(whole.ranks) > 1:
                yield Replica(f"model.{piece.name}", local(piece.parameter.detach()), whole)
            if len(part.ranks) > 1 and master is not None:
                if master.value is not piece.value:
                    yield Replica(f"master.{piece.name}", master.value.detach(), part)
                for name, tensor in self._optimizer.kept_of(master).items():
                    yield Replica(f"optimizer.{piece.name}.{name}", tensor, part)
                for name, tensor in self._outer(piece.name).items() if self._outer is not None else ():
                    yield Replica(f"outer.{piece.name}.{name}", tensor, part)
        if len(self._everyone.ranks) > 1:
            for name, buffer in self._model.buffers().items():
                yield Replica(f"model.{name}", buffer, self._everyone)

    def _sums(self, replicas: Iterable[Replica]) -> Tensor:
        device = self._world.device
        with torch.no_grad():
            sums = [sum_of_bits(replica.tensor) for replica in replicas]
        if on_host := [number for number in sums if number.device != device]:  # an optimizer's that works there
            sent = iter(sent_to(device, torch.stack(on_host)))
            sums = [number if number.device == device else next(sent) for number in sums]
        return torch.stack(sums)

    def _factor(self, replica: Replica) -> int:
        """Return a fingerprint's factor in the sum: the first holder counts as often as all others, against them."""
        others = len(replica.holders.ranks) - 1
        weight = others if self._world.rank == replica.holders.ranks[0] else -1
        odd = key_of("fingerprint", replica.name) | 1  # so that two tensors' differences do not cancel
        return _signed(weight * odd)


def limbs_of(number: Tensor | None, device: torch.device) -> Tensor:
    """A 64-bit integer (int64, no dims; None is 0) in a form that can be summed over ranks modulo 2**64; fp64."""
    if number is None:
        return torch.zeros(LIMBS, dtype=torch.float64, device=device)
    parts = [(number >> LIMB_BITS * place) & (2**LIMB_BITS - 1) for place in range(LIMBS)]
    return torch.stack(parts).double().to(device)


def is_nonzero(limbs: Sequence[float]) -> bool:
    """True unless the integers whose limbs were summed add up to 0 modulo 2**64."""
    total = sum(int(limb) << LIMB_BITS * place for place, limb in enumerate(limbs))
    return total % 2 ** (LIMBS * LIMB_BITS) != 0


def _holders(meshes: Meshes, mesh: DeviceMesh | None, placements: Sequence[Placement]) -> Holders:
    """Return the ranks that hold the same part as this one of a tensor that is split like that."""
    names = () if mesh is None else mesh.mesh_dim_names or ()
    split = {name for name, way in zip(names, placements, strict=True) if isinstance(getattr(way, "dim", None), int)}
    return Holders(meshes.holders(names, split), tuple(sorted(split)))


def _mixed(sums: Tensor) -> Tensor:
    """Return each number mixed by a bijection of 64-bit integers, which turns a difference of one bit into one of many.

    Without it a flip of the topmost bit, 2**63, times an even factor would be 0.
    """
    mixed = sums * _signed(0xBF58476D1CE4E5B9)  # SplitMix64's
    mixed = mixed ^ ((mixed >> 32) & 0xFFFFFFFF)
    return mixed * _signed(0x94D049BB133111EB)


def _signed(number: int) -> int:
    """Return `number` modulo 2**64, as an int64 holds it."""
    return (number + 2**63) % 2**64 - 2**63


def _differing(of_all: Sequence[dict[Key, int]]) -> set[Key]:
    seen: dict[Key, set[int]] = defaultdict(set)
    for of_rank in of_all:
        for key, number in of_rank.items():
            seen[key].add(number)
    return {key for key, numbers in seen.items() if len(numbers) > 1}


def _compared(name: str, sums: dict[int, int]) -> list[Corruption]:
    """Return what is wrong with the tensor `name`, given its fingerprint on each rank; nothing if all are equal."""
    (number, count), *others = Counter(sums.values()).most_common()
    if not others:
        return []
    if 2 * count <= len(sums):
        return [Corruption(name, tuple(sums), None, number)]
    healthy = [rank for rank, found in sums.items() if found == number]
    return [Corruption(name, tuple(rank for rank in sums if rank not in healthy), healthy[0], number)]
