"""Fault points: named places where a fault can be injected into a run, to test that it survives.

    ARGOSY_FAULTS='kill@optimizer:step=5,rank=1; flip@weights:step=7,rank=2,bit=30; slow@forward:rank=1,factor=2'

ACTION@POINT:KEY=VALUE,... says what happens where; the same as JSON: [{"action": "kill", "point": "optimizer",
"step": 5, "rank": 1}]. Keys `step`, `after` (a step, or a later one), `rank`, `generation` and `fraction` (of a
file) say when; a key that is left out matches anything. A fault strikes once for each rank of a run, also if the run is
started again in between, unless `again` (once in each generation), `steps` (this many steps in a row) or `every` (each
step that it divides, without end) say otherwise. Faults that struck are recorded in events/faults.jsonl of the run.

Without the variable a fault point is one comparison.
"""

from __future__ import annotations

import ctypes
import errno
import fnmatch
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from argosy.errors import UserError, near_names

FAULTS_VARIABLE = "ARGOSY_FAULTS"
RUN_DIR = "ARGOSY_RUN_DIR"
"""Environment variable: the run's folder, in whose events faults that struck are recorded."""
FAULTS_RECORD = Path("events") / "faults.jsonl"

FAULT_POINTS = {
    "node_check": "in a node health check; tensors: each result, as of `core 0 fp32 product` or `cuda:0 memory`",
    "join": "before a worker joins its world",
    "recover": "in a new world, before state is taken from others or from disk",
    "loader": "in the thread that reads a step's rows",
    "batch": "before the step's batch is taken",
    "forward": "before the forward of each microbatch, of a replay check too (of a pipeline: before its schedule)",
    "backward": "before the backward of each microbatch (of a pipeline: in each of its stages)",
    "bucket": "before a bucket of gradients is summed over ranks; tensors: bucket",
    "gradient": "when gradients are summed, before the exchange; tensors: each piece's gradient",
    "loss": "before the loss is summed over ranks; tensors: loss",
    "exchange": "before the collective after which all ranks decide whether the step counts",
    "commit": "after that decision, before the optimizer",
    "prepared": "in Muon's update, once it has the data of other ranks, before all ranks wait for each other",
    "optimizer": "inside the optimizer's step, when some of the pieces are updated",
    "weights": "after the optimizer's step; tensors: each piece's values",
    "moments": "after the optimizer's step; tensors: the optimizer's state of each piece",
    "evaluate": "before each batch of an evaluation",
    "change": "before the last rank of a site has written its change of a round",
    "outer": "before an outer step, by which a site takes the weights that all sites agreed on",
    "site_ready": "in a site's exchange, before the other sites hear that its change is ready; step: the round",
    "site_agreed": "in a site's exchange, before the round's line is in the ledger; step: the round",
    "server": "in a parameter server, before it makes an update; step: the update; rank: the server, from 0",
    "snapshot": "before state is copied for a checkpoint",
    "save": "when the writer of a checkpoint begins, and as it goes on (`fraction` of its file)",
    "rename": "before a checkpoint is given its name",
    "renamed": "after a checkpoint was given its name",
    "verify": "before a checkpoint is read again",
    "load": "before a checkpoint is loaded",
}
"""The fault points."""
STEP_BEGINS = "batch"
"""The point that tells the step to points that do not know it."""

Tensors = Callable[[], Mapping[str, Any]]
"""Returns tensors by name; called only if a fault needs them."""


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


class Faults:
    """The faults of a run, in one of its processes."""

    def __init__(self, faults: Iterable[Fault], run_dir: Path | None):
        """`run_dir`: the run's folder; else the environment's; without either, faults are remembered, not recorded."""
        self._faults = tuple(faults)
        self._points = {fault.point for fault in self._faults}
        self._run_dir = run_dir
        self._struck: set[str] = set()
        self._lock = threading.Lock()
        self._worked_s: dict[Fault, float] = {}
        self._step: int | None = None

    def meet(
        self, point: str, step: int | None, rank: int | None, fraction: float | None, tensors: Tensors | None
    ) -> None:
        """Inject the faults that are due here."""
        if point == STEP_BEGINS:
            self._step = step
        if point not in self._points:
            return
        step = self._step if step is None else step
        rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        generation = int(os.environ.get("ARGOSY_GENERATION", "0"))
        for fault in self._faults:
            if not fault.matches(point, step, rank, generation, fraction):
                continue
            target = _target(fault, tensors) if fault.action in ON_TENSORS else None
            if (target is not None or fault.action not in ON_TENSORS) and self._is_due(fault, step, rank, generation):
                self._strike(fault, target)

    def _is_due(self, fault: Fault, step: int | None, rank: int, generation: int) -> bool:
        """Return True if it has not struck often enough. It is recorded before it strikes: it may kill the process."""
        key = f"{fault} rank={rank}"
        if fault.again:
            key += f" generation={generation}"
        if fault.steps > 1:
            key += f" step={step}"
        with self._lock:
            record = self._record()
            known = self._struck | _recorded(record)
            keys = [key, *(f"{key} time={time}" for time in range(2, fault.times + 1))]
            key = next((key for key in keys if key not in known), "")
            if key:
                self._struck.add(key)
                _append(
                    record,
                    {"time_s": round(time.time(), 3), "event": "fault", "key": key, "fault": str(fault), "rank": rank,
                     "step": step, "generation": generation, "pid": os.getpid()},
                )  # fmt: skip
        return bool(key) or fault.is_lasting

    def _record(self) -> Path | None:
        """Return the file of recorded faults. Looked up late: a forked process gets its folder after the import."""
        run_dir = self._run_dir or os.environ.get(RUN_DIR)
        return Path(run_dir) / FAULTS_RECORD if run_dir else None

    def _strike(self, fault: Fault, target: Any) -> None:
        """`target`: the tensor, for a fault on a tensor."""
        if fault.action == "slow":
            self._slow_down(fault)
        elif fault.action in ON_TENSORS:
            ON_TENSORS[fault.action](target, fault)
        else:
            ACTIONS[fault.action](fault)

    def _slow_down(self, fault: Fault) -> None:
        """Sleep for `factor` - 1 times the CPU time of this process since the last call."""
        worked_s = time.process_time()
        own_s = worked_s - self._worked_s.get(fault, worked_s)
        self._worked_s[fault] = worked_s
        time.sleep(max(0.0, own_s * ((fault.factor or 2.0) - 1)) if fault.seconds is None else fault.seconds)


def fault(
    point: str,
    *,
    step: int | None = None,
    rank: int | None = None,
    fraction: float | None = None,
    tensors: Tensors | None = None,
) -> None:
    """Inject the faults that are due at `point`, one of `FAULT_POINTS`.

    step: by default the one whose batch was taken last. rank: by default that of this process.
    Raises: OSError or RuntimeError, if that is the fault.
    """
    if _armed is not None:
        _armed.meet(point, step, rank, fraction, tensors)


def arm(text: str, run_dir: Path | None = None) -> None:
    """Arm the faults that `text` describes in this process; an empty text disarms all.

    run_dir: the run's folder, where faults that struck are recorded. Raises: UserError.
    """
    global _armed  # noqa: PLW0603  (a fault point must cost nothing: it tests one name)
    _armed = Faults(parse(text), run_dir) if text.strip() else None


def parse(text: str) -> list[Fault]:
    """Parse faults, as JSON or ACTION@POINT:KEY=VALUE,...; ... Raises: UserError."""
    if text.lstrip().startswith("["):
        try:
            entries = json.loads(text)
        except json.JSONDecodeError as problem:
            raise UserError(f"{FAULTS_VARIABLE}: not JSON: {problem}") from None
    else:
        entries = [_split(part.strip()) for part in text.split(";") if part.strip()]
    return [_checked(entry) for entry in entries]


def _split(text: str) -> dict[str, Any]:
    head, _, tail = text.partition(":")
    action, at, point = head.partition("@")
    if not at:
        raise UserError(f"{FAULTS_VARIABLE}: {text!r} is not ACTION@POINT. Try kill@optimizer:step=5,rank=1.")
    pairs = [pair.partition("=") for pair in tail.split(",") if pair.strip()]
    return {"action": action.strip(), "point": point.strip()} | {k.strip(): v.strip() for k, _, v in pairs}


def _checked(entry: Mapping[str, Any]) -> Fault:
    if not isinstance(entry, Mapping):
        raise UserError(f'{FAULTS_VARIABLE}: {str(entry)[:60]!r} is no fault. Write {{"action": ..., "point": ...}}.')
    known = {f.name: f for f in fields(Fault)}
    values: dict[str, Any] = {}
    for name, value in entry.items():
        if name not in known:
            raise UserError(f"{FAULTS_VARIABLE}: a fault has no key {name!r}; {near_names(name, known, 1)}")
        kind = str(known[name].type).partition(" ")[0]
        try:
            values[name] = _READ[kind](value)
        except (ValueError, TypeError, LookupError):
            raise UserError(f"{FAULTS_VARIABLE}: {name} = {value!r} is not a {_NUMBER_KINDS[kind]}.") from None
    actions = [*ACTIONS, *ON_TENSORS, "slow"]
    for key, names in (("action", actions), ("point", list(FAULT_POINTS))):
        if (value := values.get(key)) not in names:
            raise UserError(f"{FAULTS_VARIABLE}: there is no {key} {value!r}; {near_names(str(value), names, 1)}")
    for key in ("steps", "every", "times"):
        if values.get(key, 1) < 1:
            raise UserError(f"{FAULTS_VARIABLE}: {key} = {values[key]} must be at least 1.")
    if values["action"] == "oom" and values.get("gib") is None:
        raise UserError(f"{FAULTS_VARIABLE}: oom needs gib=, the memory to take.")
    return Fault(**values)


def _truth(word: Any) -> bool:
    return {"": True, "1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[str(word).lower()]


_READ: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "bool": _truth, "str": str}
_NUMBER_KINDS = {"int": "whole number", "float": "number", "bool": "truth value", "str": "text"}


def _target(fault: Fault, tensors: Tensors | None) -> Any:
    """Return the tensor of the fault; None if none here has its name."""
    named = {} if tensors is None else tensors()
    return next((tensor for name, tensor in named.items() if fnmatch.fnmatch(name, fault.tensor)), None)


def _recorded(path: Path | None) -> set[str]:
    if path is None or not path.exists():
        return set()
    return {json.loads(line)["key"] for line in path.read_text().splitlines() if line.endswith("}")}


def _append(path: Path | None, record: Mapping[str, Any]) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(json.dumps(record).encode() + b"\n")  # one write: lines of several processes do not mix


# What faults do

FOR_EVER_S = 1_000_000


def _signal(number: signal.Signals) -> Callable[[Fault], None]:
    return lambda _: os.kill(os.getpid(), number)


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
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    "term": _signal(signal.SIGTERM),
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


_armed: Faults | None = None
arm(os.environ.get(FAULTS_VARIABLE, ""))
