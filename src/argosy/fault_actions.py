"""Faults: what one is, and what it does to a process or a tensor. `faults` says where and when they strike."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

FOR_EVER_S = 1_000_000


@dataclass(frozen=True)
class Fault:
    """One fault to inject."""

    action: str
    point: str
    step: int | None = None
    after: int | None = None
    """Strikes at this step, or at the first later one that reaches the point."""
    rank: int | None = None
    generation: int | None = None
    fraction: float | None = None
    """Strikes once at least this fraction is done."""
    steps: int = 1
    """Strikes in this many steps in a row, from `step` on."""
    every: int | None = None
    """Strikes in each step that it divides, without end."""
    again: bool = False
    """Strikes again in each generation."""
    times: int = 1
    """Strikes this often at its step: a bad step is repeated."""
    seconds: float | None = None
    """sleep, hang, gil: how long."""
    factor: float | None = None
    """slow: factor of its own work; spike: factor of all numbers."""
    bit: int = 30
    """flip: the bit, the lowest being 0."""
    index: int = 0
    """flip, nan, inf: the index in the flattened tensor."""
    tensor: str = "*"
    """flip, nan, inf, spike: a pattern; the first tensor whose name matches."""
    code: int = 1
    """exit: the exit code."""
    gib: float | None = None
    """oom: how much memory to take."""

    def __str__(self) -> str:
        keys = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        given = ",".join(f"{name}={value}" for name, value in keys.items() if name not in ("action", "point"))
        return f"{self.action}@{self.point}" + (f":{given}" if given else "")

    @property
    def is_lasting(self) -> bool:
        """True if it strikes without end, and so is recorded only once."""
        return self.every is not None or self.action == "slow"

    def matches(self, point: str, step: int | None, rank: int, generation: int, fraction: float | None) -> bool:
        """Return True if it matches this point, step and rank, whether or not it has struck before."""
        if point != self.point or self.rank not in (None, rank) or self.generation not in (None, generation):
            return False
        if self.fraction is not None and (fraction is None or fraction < self.fraction):
            return False
        first = self.step if self.after is None else self.after
        if first is not None and (step is None or step < first):
            return False
        if self.every is not None:
            return step is not None and step % self.every == 0
        return self.step is None or self.action == "slow" or (step is not None and step < self.step + self.steps)


def _stop(_: Fault) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _kill(_: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _terminate(_: Fault) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _exit(fault: Fault) -> NoReturn:
    os._exit(fault.code)


def _raise(fault: Fault) -> NoReturn:
    raise RuntimeError(f"injected fault: {fault}")


def _io_error(code: int) -> Callable[[Fault], NoReturn]:
    def fail(fault: Fault) -> NoReturn:
        raise OSError(code, f"{os.strerror(code)} (injected fault: {fault})")

    return fail


def _sleep(fault: Fault) -> None:
    time.sleep(FOR_EVER_S if fault.seconds is None else fault.seconds)


def _hold_gil(fault: Fault) -> None:
    seconds = FOR_EVER_S if fault.seconds is None else fault.seconds
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds % 1 * 1e6)))  # PyDLL, unlike CDLL, keeps the lock
    ctypes.PyDLL(None).sleep(ctypes.c_uint(int(seconds)))


def _begin_collective(_: Fault) -> None:
    """Begin a collective that no other rank begins."""
    import torch
    import torch.distributed as dist

    device = torch.device("cpu") if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator()
    dist.all_reduce(torch.zeros(1, device=device))


def _take_memory(fault: Fault) -> None:
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # the kernel should choose this process
    assert fault.gib is not None
    _hoard.append(b"\1" * int(fault.gib * 2**30))


_hoard: list[bytes] = []

ACTIONS: dict[str, Callable[[Fault], None]] = {
    "kill": _kill,
    "stop": _stop,
    "term": _terminate,
    "exit": _exit,
    "raise": _raise,
    "sleep": _sleep,
    "hang": _sleep,
    "gil": _hold_gil,
    "eio": _io_error(errno.EIO),
    "enospc": _io_error(errno.ENOSPC),
    "oom": _take_memory,
    "collective": _begin_collective,
}
"""Effects of a fault on its process."""


def _set(value: float) -> Callable[[Any, Fault], None]:
    def strike(tensor: Any, fault: Fault) -> None:
        tensor.detach().view(-1)[fault.index % tensor.numel()] = value

    return strike


def _scale(tensor: Any, fault: Fault) -> None:
    tensor.detach().mul_(1e4 if fault.factor is None else fault.factor)


def _flip(tensor: Any, fault: Fault) -> None:
    """Flip one bit of one number, in place."""
    import torch

    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().view(-1)[fault.index % tensor.numel()].view(integer)
    width = 8 * tensor.element_size()
    place = fault.bit % width
    mask = 1 << place if place < width - 1 or integer is torch.uint8 else -(1 << place)
    bits.bitwise_xor_(torch.tensor(mask, dtype=integer, device=tensor.device))


ON_TENSORS: dict[str, Callable[[Any, Fault], None]] = {
    "nan": _set(float("nan")),
    "inf": _set(float("inf")),
    "spike": _scale,
    "flip": _flip,
}
"""Effects of a fault on a tensor, in place."""
