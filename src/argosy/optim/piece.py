"""One parameter in the optimizer: this rank's part of it, and its state, small between steps, fp32 during one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.config.optimizer import ParameterSettings
from argosy.precision import SIGNED, UNSIGNED, Quantized, Rounding, dequantize, places, quantize


def _identity(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, eq=False)
class Piece:
    """A rank's part of one parameter. Ranks that share a parameter have its pieces in the same order."""

    name: str
    """The parameter's name in the whole model; the same on all ranks that share it."""
    value: Tensor
    """A plain tensor, updated in place: fp32, or bf16 where weights have no fp32 copy. It may be empty. Set its `grad`
    before a step (an empty piece needs none)."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    cut: frozenset[int] = frozenset()
    """The dims along which it is cut; the same on all ranks that share it, also on those whose part is empty."""
    gather: Callable[[Tensor], Tensor] = _identity
    """Turns a tensor cut like `value` into the whole, on every rank that shares it; a collective."""
    scatter: Callable[[Tensor], Tensor] = _identity
    """Turns the whole, which all ranks that share it know, into this rank's part, a box of it; no communication."""
    group: dist.ProcessGroup | None = None
    """All ranks that call `gather` for this parameter, replicas included: all that need the same update. They divide
    the work on whole parameters. None: each rank does all of it."""
    device: torch.device | None = None
    """The device of their messages; None: that of `value`, which may be a twin in host memory."""


MOMENT_CODES = {"exp_avg": SIGNED, "exp_avg_sq": UNSIGNED}


@dataclass(frozen=True)
class ParameterUpdate:
    """One parameter during a step: fp32 tensors of the local shape, changed in place."""

    piece: Piece
    weight: Tensor
    gradient: Tensor
    moments: dict[str, Tensor]
    step: int
    """Number of the step, from 1."""


@dataclass
class Slot:
    """A piece with its settings and state."""

    piece: Piece
    settings: ParameterSettings
    seed: int
    names: tuple[str, ...]
    """Names of its moments."""
    is_compiled: bool = False
    """True if what narrows and widens numbers goes through torch.compile."""
    steps: int = 0
    """Steps taken."""
    _moments: dict[str, Tensor | Quantized] = field(default_factory=dict)
    _rounding: Rounding | None = None

    @property
    def is_plain(self) -> bool:
        """True if opening it makes no copies, since all is fp32."""
        return self.piece.value.dtype == torch.float32 and not self.settings.int8

    @property
    def nbytes(self) -> int:
        """Memory of the state, bytes."""
        return sum(moment.nbytes for moment in self._moments.values())

    def moments(self) -> dict[str, Tensor]:
        """Return the moments, fp32, local shape: the live tensors if these are fp32. Zeros before the first step."""
        return {name: self._widened(name) for name in self.names}

    def moments_to_save(self) -> dict[str, Callable[[], Tensor]]:
        """Return functions that return the live moments; of those that are kept in 8 bits, fp32 copies in the host's
        memory."""
        return {name: partial(self._to_save, name) for name in self.names}

    def adopt(self, other: Slot) -> bool:
        """Take over the moments and steps of `other`, of a piece like this one, without a copy. Return False, and do
        nothing, if it has none or keeps them otherwise."""
        is_alike = (other.names, other.settings.int8) == (self.names, self.settings.int8)
        if not other._moments or not is_alike or other.piece.value.device != self.piece.value.device:
            return False
        self._moments, self.steps = {**other._moments}, other.steps
        return True

    def kept(self) -> dict[str, Tensor]:
        """Return the live tensors that hold the moments; none before the first step."""
        tensors: dict[str, Tensor] = {}
        for name, moment in self._moments.items():
            if isinstance(moment, Quantized):
                tensors |= {f"{name}.codes": moment.codes, f"{name}.scales": moment.scales}
            else:
                tensors[name] = moment
        return tensors

    def load(self, moments: dict[str, Tensor]) -> None:
        """Restore moments, in place; those that `moments` returned come back bit for bit."""
        for name, live in self.moments().items():
            value = moments[name]
            if value.shape != live.shape:
                raise ValueError(f"{self.piece.name}: {name} is {list(value.shape)}, not {list(live.shape)}")
            if value.data_ptr() != live.data_ptr():  # else filled already, as those of a checkpoint are
                live.copy_(value)
            self._keep(name, live)

    def gradient(self) -> Tensor:
        """Return the gradient, fp32 with the local shape. Raises: ValueError if the piece has none."""
        gradient = self.piece.value.grad
        if gradient is not None:
            return gradient.float()
        if self.piece.value.numel():
            raise ValueError(f"{self.piece.name} has no gradient; give it zeros if no token reached it")
        return torch.zeros_like(self.piece.value, dtype=torch.float32)

    def open(self) -> ParameterUpdate:
        """Return the step's tensors. Raises: ValueError if the piece has no gradient."""
        gradient = self.gradient()
        self.steps += 1
        return ParameterUpdate(self.piece, self.piece.value.detach().float(), gradient, self.moments(), self.steps)

    def close(self, update: ParameterUpdate) -> None:
        """Store the tensors after the step, rounded without bias where they are kept in fewer bits."""
        key = self.seed, self.steps, self.piece.name
        if self.settings.int8:
            for name, moment in update.moments.items():
                self._moments[name] = self._at_random().quantize(moment, MOMENT_CODES[name], *key, name)
        value = self.piece.value.detach()
        if value.dtype == torch.bfloat16:
            value.copy_(self._at_random().to_bf16(update.weight, *key, "weight"))

    def _to_save(self, name: str) -> Tensor:
        moment = self._widened(name)
        return moment.cpu() if self.settings.int8 else moment

    def _widened(self, name: str) -> Tensor:
        if name not in self._moments:
            self._keep(name, torch.zeros_like(self.piece.value.detach(), dtype=torch.float32))
        moment = self._moments[name]
        return dequantize(moment, self.is_compiled) if isinstance(moment, Quantized) else moment

    def _keep(self, name: str, moment: Tensor) -> None:
        self._moments[name] = quantize(moment, MOMENT_CODES[name]) if self.settings.int8 else moment

    def _at_random(self) -> Rounding:
        if self._rounding is None:
            at = places(self.piece.shape, self.piece.scatter, self.piece.value.device)
            self._rounding = Rounding(at, self.is_compiled)
        return self._rounding


@contextmanager
def opened(slots: Sequence[Slot]) -> Iterator[list[ParameterUpdate]]:
    """Open the slots' tensors for one step, and store them when the block ends."""
    updates = [slot.open() for slot in slots]
    yield updates
    for slot, update in zip(slots, updates, strict=True):
        slot.close(update)
