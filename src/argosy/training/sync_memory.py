"""Compressor state, a part of the run's state: residuals, momenta, and the matrices of PowerSGD.

A residual belongs to one replica (or to a group of them that sums inside first, each of which has its part of it), and
what counts is the sum of all. So each is saved by the number of its replica, and a run that goes on with fewer replicas
adds up those of the ones that it lacks; with more, the new ones begin with none. The boxes say of how many replicas
they are:

    sync.residual.1of4.blocks.0.mlp.up.weight      replica 1 of 4: a part of the parameter's shape
    sync.q.LAYOUT.PLACE.3                          of bucket 3 at a place of the mesh, for the same layout only
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from argosy.checkpoint.boxes import Box
from argosy.checkpoint.shards import part_box
from argosy.parallel.buckets import Bucket
from argosy.parallel.model import ParallelModel
from argosy.parallel.pieces import PlacedPiece

SUMMED = ("residual", "momentum")
"""Compressor state for each number of a piece; it counts as its sum over replicas."""
_SUMMED = re.compile(r"sync\.(?:residual|momentum)\.(?P<replica>\d+)of(?P<replicas>\d+)\.(?P<name>.+)")
_Q = re.compile(r"sync\.q\.(?P<layout>[^.]+)\.")


@dataclass(frozen=True)
class SavedSyncState:
    """The compressor state that a checkpoint has, by its boxes."""

    kinds: tuple[str, ...] = ()
    """The kinds of `SUMMED` that it has."""
    dense: int = 0
    """Replicas that keep something of parameters other than experts."""
    experts: int = 0
    """Replicas that keep something of experts."""
    layout: str = ""
    """The layout of PowerSGD's matrices; empty: there are none."""

    @classmethod
    def of(cls, boxes: Iterable[Box]) -> SavedSyncState:
        """Return what these boxes are a part of."""
        kinds: set[str] = set()
        replicas, layout = {False: 0, True: 0}, ""
        for box in boxes:
            if not box.name.startswith("sync."):
                continue
            if match := _SUMMED.fullmatch(box.name):
                kinds.add(box.name.split(".")[1])
                replicas[_is_expert(match["name"])] = int(match["replicas"])
            elif match := _Q.match(box.name):
                layout = match["layout"]
        return cls(tuple(sorted(kinds)), replicas[False], replicas[True], layout)

    def joined(self, other: SavedSyncState) -> SavedSyncState:
        """Return what two parts of one state have together."""
        return SavedSyncState(
            tuple(sorted({*self.kinds, *other.kinds})),
            max(self.dense, other.dense),
            max(self.experts, other.experts),
            max(self.layout, other.layout),
        )


NO_PAST = SavedSyncState()


class SyncMemory:
    """The memory of this rank's compressors as boxes."""

    def __init__(self, model: ParallelModel):
        self._buckets, self._layout = model.compressed_buckets, model.layout
        self._place = "-".join(str(model.meshes.rank(axis)) for axis in ("pp", "dp_shard", "cp", "tp"))

    def boxes(self) -> dict[Box, Tensor]:
        """Return what this rank keeps: live tensors."""
        kept = {
            _box(kind, bucket.replica, bucket.replicas, piece, offset, tensor): tensor
            for bucket, kind, piece, offset, tensor in self._summed()
        }
        return kept | self._qs()

    def wanted(self, past: SavedSyncState) -> dict[Box, Tensor]:
        """Return tensors to fill with what this rank takes over of a state that has `past`."""
        wanted: dict[Box, Tensor] = {}
        for bucket, kind, piece, offset, tensor in self._summed():
            replicas = past.experts if _is_expert(piece.name) else past.dense
            if kind in past.kinds:
                for replica in range(bucket.replica, replicas, bucket.replicas):
                    filled = tensor if replicas == bucket.replicas else tensor.new_empty(tensor.shape)
                    wanted[_box(kind, replica, replicas, piece, offset, tensor)] = filled
        return wanted | (self._qs() if past.layout == self._layout else {})

    def restored(self, boxes: Mapping[Box, Tensor]) -> None:
        """Take over the tensors of `wanted`, which are filled; what is not among them begins anew."""
        found: dict[tuple[str, str], list[Tensor]] = {}
        for box, tensor in boxes.items():
            if match := _SUMMED.fullmatch(box.name):
                found.setdefault((box.name.split(".")[1], match["name"]), []).append(tensor)
        for _, kind, piece, _, tensor in self._summed():
            parts = found.get((kind, piece.name), [])
            total = sum(parts[1:], start=parts[0]) if parts else tensor.new_zeros(tensor.shape)
            if total.data_ptr() != tensor.data_ptr():
                tensor.copy_(total)
        have_q = any(_Q.match(box.name) for box in boxes)
        for bucket in self._buckets:
            bucket.memory.drop()
            if "q" in bucket.memory.kept and not have_q:
                bucket.memory.kept["q"].zero_()

    def _summed(self) -> Iterator[tuple[Bucket, str, PlacedPiece, tuple[int, ...], Tensor]]:
        for bucket in self._buckets:
            for kind in SUMMED:
                for piece, offset, tensor in bucket.kept_of_pieces(kind):
                    yield bucket, kind, piece, offset, tensor

    def _qs(self) -> dict[Box, Tensor]:
        found: dict[Box, Tensor] = {}
        for bucket in self._buckets:
            if (q := bucket.memory.kept.get("q")) is not None and q.numel():
                part = f"-part{bucket.part}" if bucket.part else ""
                name = f"sync.q.{self._layout}.{self._place}{part}.{bucket.number}"
                found[part_box(name, q, q.shape, (0,) * q.ndim)] = q
        return found


def _is_expert(name: str) -> bool:
    return ".experts." in name


def _box(kind: str, replica: int, replicas: int, piece: PlacedPiece, offset: tuple[int, ...], tensor: Tensor) -> Box:
    name = f"sync.{kind}.{replica}of{replicas}.{piece.name}"
    return part_box(name, tensor, piece.shape, offset)
