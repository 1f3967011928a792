"""Files by which the ranks of a site and its exchange hand each other numbers: what changed, and whole outer states.

Each is one vector in the order of the parameter table, or several, so that sites may have unlike plans. Every rank
writes the boxes that are dealt to it, and reads those that it holds.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from argosy.checkpoint.boxes import Box
from argosy.faults import fault
from argosy.files import make_folder, sized_file
from argosy.parallel.pieces import PlacedPiece
from argosy.parallel.world import World
from argosy.sync.layout import LeftChange, LeftState, write_record
from argosy.sync.wire import F32, Flat
from argosy.training.outer_state import OuterState
from argosy.training.state import TrainState, boxes_written

STEP_ENTRY = "step"
"""Entries of an optimizer's state besides moments, which are as large as the parameter."""


class SiteFiles:
    """Writes and reads them for one rank. All ranks call each method together."""

    def __init__(self, state: TrainState, outer: OuterState, world: World):
        self._state, self._outer, self._world, self._sites = state, outer, world, outer.sites
        self._mine: dict[str, Box] | None = None

    def leave_change(self, number: int, about: LeftChange) -> None:
        """Write what changed in a round, and `about` it. What was left once stays: steps made again change alike."""
        masters = self._state.model.masters
        travels = self._sites.merge_after(number) > self._sites.end_of(number)
        if self._is_left(number):
            if travels and self._outer.sent_in != number:
                self._send_again(number)
            return
        if self._outer.sent_in != number:
            self._outer.send(number, masters)
        self._leave(number, self._outer.sent(), about)
        if not travels:
            self._outer.forget_sent()

    def leave_gradient(self, number: int, about: LeftChange) -> None:
        """Write the site's gradient of a round of one step, for `leave_change`'s reader."""
        if not self._is_left(number):
            pieces = self._state.model.pieces
            self._leave(number, {p.name: p.value.grad for p in pieces if p.value.grad is not None}, about)

    def _is_left(self, number: int) -> bool:
        return self._world.share_first(lambda: self._sites.about(number).exists(), bool)

    def _leave(self, number: int, parts: Mapping[str, Tensor], about: LeftChange) -> None:
        """Write this rank's parts of what the site sends in a round."""
        sites, flat = self._sites, self._sites.flat(number)
        partial = sites.change(number).with_suffix(".partial")
        if self._world.is_first:
            make_folder(sites.folder)
            sized_file(partial, 4 * flat.elements)
        self._world.barrier()
        vector = np.memmap(partial, np.float32, "r+", shape=(flat.elements,))
        mine = self.boxes()
        for piece in self._state.model.masters:
            if piece.name in mine and piece.name in flat.shapes:
                view = flat.part(vector, *piece.place)
                view[...] = parts[piece.name].float().cpu().numpy()
        vector.flush()
        fault("change", step=self._state.step, rank=self._world.rank)
        self._world.barrier()
        if self._world.is_first:
            partial.replace(sites.change(number))
            write_record(sites.about(number), about)

    def _send_again(self, number: int) -> None:
        """Take what was left in an earlier world for what is sent, so that it is in checkpoints."""
        flat, vector = self._sites.flat(number), None
        with suppress(OSError):  # the round was made meanwhile: then checkpoints need it no more
            vector = np.memmap(self._sites.change(number), np.float32, "r")
        if self._world.any(vector is None) or vector is None:
            return
        masters = self._state.model.masters
        sent = self._outer.sent_before(number, masters)
        for piece in masters:
            if piece.name in sent:
                part = flat.part(vector, *piece.place)
                sent[piece.name].copy_(torch.from_numpy(np.array(part)))

    def leave_state(self, number: int) -> None:
        """Leave the whole outer state for another site that wants it."""
        sites = self._sites
        if not self._world.share_first(sites.want_state.exists, bool):
            return
        keys, elements = self.keys(number), sum(flat.elements for flat in sites.flats)
        if sites.sums_gradients(number + 1):
            self._outer.begin(self._state.model.masters)
        partial = sites.state(number).with_suffix(".partial")
        if self._world.is_first:
            sized_file(partial, 4 * elements * len(keys))
        self._world.barrier()
        mine = self.boxes()
        for flat, vectors in self.vectors(partial, "r+", number):
            for piece in self._state.model.masters:
                if piece.name in mine and piece.name in flat.shapes:
                    for key, tensor in self._kept(piece, number).items():
                        view = flat.part(vectors[key], *piece.place)
                        view[...] = tensor.cpu().numpy()
        self._world.barrier()
        if self._world.is_first:
            data = partial.read_bytes()
            partial.replace(sites.state(number))
            write_record(sites.state_about(number), LeftState(bytes=len(data), sum=zlib.crc32(data)))
            sites.want_state.unlink(missing_ok=True)

    def boxes(self) -> dict[str, Box]:
        """Return the boxes that this rank writes: each is one rank's, of those that hold it."""
        if self._mine is None:
            self._mine = boxes_written(self._state.model.masters, self._world)
        return self._mine

    def adopt(self, number: int) -> None:
        """Take over another site's state after a round, which is in the site's folder."""
        masters, optimizer = self._state.model.masters, self._state.optimizer
        for flat, vectors in self.vectors(self._sites.adopted, "r", number):
            self._outer.adopt(vectors, flat, masters)
            for piece in masters if self._sites.sums_gradients(number + 1) else ():
                if piece.name in flat.shapes:
                    moments = optimizer.state_of(piece)
                    for key in moments.keys() - {STEP_ENTRY}:
                        part = flat.part(vectors[key], *piece.place)
                        moments[key] = torch.from_numpy(np.array(part)).to(piece.value.device)
                    optimizer.load_state(
                        piece, {**moments, STEP_ENTRY: torch.tensor(float(self._sites.end_of(number)))}
                    )

    def keys(self, number: int) -> list[str]:
        """Return what the state after a round has of each parameter.

        If sites sum gradients after it, that is the optimizer's state too: it is the same at all sites, and has to stay
        so. And the weights are those of the model, which until then no outer step has changed.
        """
        if not self._sites.sums_gradients(number + 1):
            return list(self._outer.keys)
        masters, optimizer = self._state.model.masters, self._state.optimizer
        mine = sorted({key for piece in masters for key in optimizer.state_of(piece)} - {STEP_ENTRY})
        return [*self._outer.keys, *sorted({key for keys in self._world.gather(mine, list[str]) for key in keys})]

    def _kept(self, piece: PlacedPiece, number: int) -> dict[str, Tensor]:
        kept = dict(self._outer.state_of(piece.name))
        if self._sites.sums_gradients(number + 1):
            kept |= self._state.optimizer.state_of(piece)
            del kept[STEP_ENTRY]
        return kept

    def vectors(self, path: Path, mode: Literal["r", "r+"], number: int) -> Iterator[tuple[Flat, dict[str, F32]]]:
        """Yield each fragment with its vectors in the file of the whole state after a round, by key."""
        keys, start = self.keys(number), 0
        whole = np.memmap(path, np.float32, mode)
        for flat in self._sites.flats:
            vectors = {}
            for key in keys:
                vectors[key] = whole[start : start + flat.elements]
                start += flat.elements
            yield flat, vectors
