"""One server's part of the state: whole parameters, their optimizer state, and the gradients that are on their way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from argosy.checkpoint.boxes import Box
from argosy.checkpoint.history import History
from argosy.checkpoint.load import load_into, missing_from, problem_of
from argosy.checkpoint.manifest import CheckpointManifest
from argosy.checkpoint.save import Saver
from argosy.checkpoint.shards import wholes
from argosy.checkpoint.store import Checkpoint, find, step_folder
from argosy.checkpoint.weights import MODEL_PREFIX, fill_from_folder
from argosy.checkpoint.writer import NewsSender, Upkeep
from argosy.config.identity import config_sha256
from argosy.data.stores.model_folder import is_model_folder
from argosy.errors import UserError
from argosy.faults import fault
from argosy.models.initialize import fill_initial
from argosy.models.user_code import load_family
from argosy.optim.optimizer import Optimizer, optimizer_of
from argosy.optim.piece import Piece
from argosy.parallel.world import World
from argosy.plan.parameters import parameter_table
from argosy.sync.layout import ServerLayout
from argosy.sync.messages import MESSAGE_PIECE_BYTES


class DelayedNesterov:
    """Nesterov's SGD on changes that come one by one, with a momentum that is updated only once in `every` updates.

    Liu et al. 2024 (arXiv 2401.09135), algorithm 3 with c = 0: a momentum that takes up each stale change as it comes
    makes asynchronous outer steps worse than synchronous ones. With d the change of a worker (the weights that it was
    given minus those that it has come to), r its rate, and b the momentum,

        sum = sum + r d;  w = w - r d, and at every N-th update: m = b m + sum, w = w - b m, sum = 0.

    The paper's r is lr / N. Here it is lr / (s + 1), s the staleness (Xie et al. 2019, arXiv 1903.03934, with a = 1):
    the same for N workers that are alike, and lr for one that is alone. With N = 1 it is PyTorch's Nesterov SGD.
    """

    def __init__(self, pieces: Sequence[Piece], momentum: float, every: int):
        self.pieces, self._momentum, self._every = list(pieces), momentum, every
        self._state = {piece.name: self._zeros(piece) for piece in pieces}

    def _zeros(self, piece: Piece) -> dict[str, Tensor]:
        keys = ("momentum", "sum") if self._momentum else ()
        return {key: torch.zeros_like(piece.value) for key in keys}

    def state_of(self, piece: Piece) -> dict[str, Tensor]:
        """Return what is kept of a piece, live."""
        return self._state[piece.name]

    @torch.no_grad()
    def step(self, update: int, rate: float) -> None:
        """Apply the change in each piece's `grad` as update `update`, from 0."""
        is_turn = (update + 1) % self._every == 0
        for piece in self.pieces:
            assert piece.value.grad is not None
            state = self._state[piece.name]
            piece.value.sub_(piece.value.grad, alpha=rate)
            if not state:
                continue
            state["sum"].add_(piece.value.grad, alpha=rate)
            if is_turn:
                state["momentum"].mul_(self._momentum).add_(state["sum"])
                piece.value.sub_(state["momentum"], alpha=self._momentum)
                state["sum"].zero_()


class RequestRefused(Exception):
    """A worker, or the first server, asked for something that cannot be done. The message says why."""


class ShardSaver(Saver):
    """Writes one server's part of checkpoints: the servers are the ranks of a world that has no collectives."""

    def __init__(self, run_dir: Path, number: int, servers: int, heard: NewsSender, upkeep: Upkeep, ticket: str):
        super().__init__(run_dir, World(number, servers), heard, upkeep)
        self._ticket = ticket

    def _share_out(self, boxes: list[Box]) -> None:
        """Write all of it: no other server has any."""
        self._mine = boxes


class ServerShard:
    """The state of one server."""

    def __init__(self, layout: ServerLayout, number: int, run_dir: Path, data_identity: str, heard: NewsSender):
        """`heard(news, **facts)`: as of `Saver`."""
        self._layout, self._number, self._run_dir, self._heard = layout, number, run_dir, heard
        self._run, self._data_identity = layout.run, data_identity
        self._flat = layout.flats[number]
        self.generation, self.version = "", 0
        self._vector = torch.zeros(self._flat.elements)
        self._sent: bytes | None = None
        self._staged: dict[str, tuple[str, bytearray, set[int]]] = {}
        self._saver: ShardSaver | None = None
        load_family(self._run)
        self._begin_rule()

    @property
    def size_bytes(self) -> int:
        return 4 * self._flat.elements

    @property
    def _wire_bytes(self) -> int:
        wire = self._layout.wire
        return wire.blocks(self._flat.elements) * wire.block_bytes

    # ---- versions -----------------------------------------------------------------------------------------------

    def begin(self, generation: str, version: int) -> None:
        """Go to a version: that of a checkpoint, or the initial weights if it is 0.

        Raises: UserError, DamagedCheckpoint.
        """
        self.close()
        self._staged.clear()
        self._begin_rule()
        if version:
            self._load(Checkpoint(step_folder(self._run_dir, self._layout.step_of(version))))
        else:
            self._initialize()
        settings = self._run.checkpoint
        upkeep = Upkeep(settings.keep_last, settings.keep_every, settings.remote)
        self._saver = ShardSaver(self._run_dir, self._number, self._layout.servers, self._heard, upkeep, generation)
        self._saver.committed.add(self._layout.step_of(version))
        self.generation, self.version, self._sent = generation, version, None

    def weights(self, generation: str, version: int) -> bytes | None:
        """Return the bytes of the weights if they are of `version` or newer, else None. Raises: RequestRefused."""
        if generation != self.generation:
            raise RequestRefused(f"weights of {generation}, and this server is at {self.generation}")
        if self.version < version:
            return None
        if self._sent is None:
            self._sent = self._vector.numpy().tobytes()
        return self._sent

    def apply(self, generation: str, update: int, lease: str, rate: float) -> None:
        """Apply a worker's gradient as update `update` at this learning rate. Raises: RequestRefused if it cannot."""
        if generation != self.generation or update != self.version:
            raise RequestRefused(
                f"update {update} of {generation}, and this server is at {self.version} of {self.generation}"
            )
        gradient = self._take(lease)
        fault("server", step=update, rank=self._number)
        at = 0
        for piece in self._rule.pieces:
            piece.value.grad = gradient[at : at + piece.value.numel()].view(piece.shape)
            at += piece.value.numel()
        if isinstance(self._rule, Optimizer):
            self._rule.set_learning_rate(rate)
            self._rule.step()
        else:
            self._rule.step(update, rate)
        for piece in self._rule.pieces:
            piece.value.grad = None
        self.version += 1
        self._sent = None

    # ---- gradients ----------------------------------------------------------------------------------------------

    def stage(self, site: str, lease: str, at: int, data: bytes) -> None:
        """Keep a piece of a worker's gradient; that of what it was dealt before is dropped. Raises: RequestRefused.

        The gradient of a worker that ends stays: the first server's order to apply it may be on its way.
        """
        if at % MESSAGE_PIECE_BYTES or len(data) != min(MESSAGE_PIECE_BYTES, self._wire_bytes - at):
            raise RequestRefused(f"{len(data)} bytes at {at} are no piece of a gradient of {self._wire_bytes} bytes")
        if site not in self._staged or self._staged[site][0] != lease:
            self._staged[site] = (lease, bytearray(self._wire_bytes), set())
        _, whole, there = self._staged[site]
        whole[at : at + len(data)] = data
        there.add(at)

    def has(self, site: str, lease: str) -> bool:
        """Return True if a worker's gradient is here, and all its numbers are finite."""
        name, whole, there = self._staged.get(site, ("", bytearray(), set()))
        if name != lease or len(there) != -(-self._wire_bytes // MESSAGE_PIECE_BYTES):
            return False
        return bool(np.isfinite(self._decoded(whole)).all())

    def _take(self, lease: str) -> Tensor:
        site = next((site for site, (name, _, _) in self._staged.items() if name == lease), None)
        if site is None or not self.has(site, lease):
            raise RequestRefused(f"the gradient of {lease} is not here, or not finite")
        _, whole, _ = self._staged.pop(site)
        return torch.from_numpy(self._decoded(whole).copy())

    def _decoded(self, whole: bytearray) -> Any:
        return self._layout.wire.decode(np.frombuffer(whole, np.uint8))[: self._flat.elements]

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Begin to write this server's part of the checkpoint of its version."""
        assert self._saver is not None
        run, step = self._run, self._layout.step_of(self.version)
        manifest = CheckpointManifest(
            step=step,
            tokens=step * run.tokens_per_step,
            history=History(),
            saved_at_s=time.time(),
            plan="sync=async",
            data_identity=self._data_identity,
            config_sha256=config_sha256(run),
            has_optimizer=isinstance(self._rule, Optimizer),
            files={},
        )
        self._saver.save(self._parts(), manifest)

    def poll(self) -> None:
        if self._saver is not None:
            self._saver.poll()

    def save_last(self) -> str | None:
        """Write this server's part, read it back, and let go of the process that does; return why that failed, or None.

        Before the first server has said where to begin there is nothing to write.
        """
        if self._saver is None:
            return None
        self.save()
        self._saver.close()
        error, self._saver = self._saver.last_error, None
        return error

    def close(self) -> None:
        """Let go of the process that writes checkpoints, whatever it does."""
        if self._saver is not None:
            self._saver.abandon()
            self._saver = None

    def _parts(self) -> dict[Box, Tensor]:
        parts = wholes({piece.name: piece.value for piece in self._rule.pieces}, "model.")
        for piece in self._rule.pieces:
            parts |= wholes({self._box(piece, key): kept for key, kept in self._rule.state_of(piece).items()})
        return parts

    def _box(self, piece: Piece, key: str) -> str:
        """Return the name under which a checkpoint has what is kept of a piece."""
        is_optimizer = isinstance(self._rule, Optimizer)
        return f"optimizer.{piece.name}.{key}" if is_optimizer else f"outer.{key}.{piece.name}"

    # ---- values -------------------------------------------------------------------------------------------------

    def _begin_rule(self) -> None:
        """Make what applies pushes: the run's optimizer for gradients, the outer one for what local steps changed."""
        run, at = self._run, 0
        pieces = []
        for name, shape in self._flat.shapes.items():
            size = int(np.prod(shape, dtype=np.int64))
            pieces.append(Piece(name, self._vector[at : at + size].view(shape), shape))
            at += size
        self._rule: Optimizer | DelayedNesterov
        if self._layout.local_steps > 1:
            self._rule = DelayedNesterov(pieces, run.sync.outer_momentum, every=len(run.sites))
        else:
            self._rule = optimizer_of(run, pieces)

    @torch.no_grad()
    def _initialize(self) -> None:
        table = parameter_table(self._run.model)
        for piece in self._rule.pieces:
            origin = (0,) * piece.value.ndim
            fill_initial(piece.value, piece.name, table[piece.name], origin, self._run.model, self._run.seed)
        if self._run.model.weights is not None:
            if is_model_folder(self._run.model.weights):
                fill_from_folder(
                    {box: part for box, part in self._parts().items() if box.name.startswith(MODEL_PREFIX)},
                    self._run.model.weights,
                )
            else:
                self._load(find(Path(self._run.model.weights), problem_of), only_weights=True)

    def _load(self, checkpoint: Checkpoint, only_weights: bool = False) -> None:
        parts = self._parts()
        weights = {box: part for box, part in parts.items() if box.name.startswith("model.")}
        if problems := missing_from(weights if only_weights else parts, checkpoint):
            raise UserError(f"{checkpoint.folder} is of another model or optimizer: {problems[0]}")
        load_into(weights if only_weights else parts, checkpoint)
        if only_weights or not isinstance(self._rule, Optimizer):
            return
        by_name = {box.name: part for box, part in parts.items()}
        for piece in self._rule.pieces:
            keys = self._rule.state_of(piece)
            self._rule.load_state(piece, {key: by_name[self._box(piece, key)] for key in keys})
