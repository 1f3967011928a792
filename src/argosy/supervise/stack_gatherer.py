"""Stacks and progress of a node's workers, written down when `argosy stacks` asks, or when a world ends in which all
stood still; of workers on GPUs, what NCCL's flight recorder holds too.

Who may write to the run's folder may ask: a request is one small file there, which each agent looks for every second,
and its answer is a file beside it. Nothing else is run for whoever asks.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Required

from typing_extensions import TypedDict  # that of typing has no schema before Python 3.12

from argosy.files import atomic_write
from argosy.observe import stacks
from argosy.processes.child import STOPPED, process_state
from argosy.supervise.nodes import RankState, WorkerProcess

STACKS_FOLDER, STACKS_REQUEST = "stacks", "request.json"
REQUEST_EVERY_S = 1.0
COLLECT_S = 0.3
"""Time that workers have to write their stacks."""
REQUEST_OLD_S = 60.0
"""A request is not answered any more after this time: its sender has given up."""
MOST_REQUEST_BYTES = 4096
"""The largest request."""
MOST_STACK_BYTES = 2**17
"""The most that is read of one worker's stacks."""
MOST_ANSWER_BYTES = 2**26
"""The largest answer of a node."""
NOT_A_REQUEST = (ValueError, TypeError, KeyError, RecursionError)
"""Errors of reading any bytes as a request."""
REQUEST_NAME = re.compile(r"[0-9a-z-]{1,64}")
STUCK_RANK_S = 5.0
"""If a world is broken off in which a rank has been in one place for so long, it is written down where."""


class WorkerStacks(TypedDict, total=False):
    """A process, as much as it shows of where it is."""

    rank: int | None
    pid: Required[int]
    slot: int
    generation: int
    process: str
    """State letter of the process; empty if it is gone."""
    step: int
    phase: str
    phase_s: float
    """Seconds since it came to `phase`."""
    collectives: dict[str, int]
    """Process group -> collectives that it has begun."""
    stack: str
    """As faulthandler writes it."""
    problem: str
    """Why it could not say more."""


@dataclass(frozen=True)
class NodeStacks:
    """A node's answer, which is kept in the run's folder."""

    time_s: float
    node: str
    why: str
    """"asked for", or why a world was broken off."""
    workers: list[WorkerStacks]


@dataclass
class _Asked:
    """Workers that write their stacks now."""

    name: str
    why: str
    due: float
    workers: list[WorkerStacks]
    logs: dict[int, tuple[Path, int]] = field(default_factory=dict)
    """Process -> its log, and how long that was before it was asked."""


class StackGatherer:
    """The agent's side. None of its methods waits, but `gather_now`."""

    def __init__(self, run_dir: Path, node: str):
        self._run_dir, self._node = run_dir, node
        self._looked_at, self._answered = 0.0, ""
        self._asked: _Asked | None = None

    def keep(self, now: float, scratch: Path, workers: Iterable[WorkerProcess]) -> None:
        """Look for a request, and answer one once the workers have had the time. now: monotonic seconds."""
        if self._asked is not None:
            if now >= self._asked.due:
                self._answer()
        elif now - self._looked_at >= REQUEST_EVERY_S:
            self._looked_at = now
            if name := self._request():
                self._answered = name
                self._ask(name, "asked for", now, scratch, workers)

    def gather_now(self, name: str, why: str, scratch: Path, workers: Iterable[WorkerProcess]) -> None:
        """Write down where the workers are, before some of them are killed."""
        members = list(workers)
        ask_flight_recorders(self._run_dir / STACKS_FOLDER, scratch, [worker.rank for worker in members])
        self._ask(name, why, time.monotonic(), scratch, members)
        if self._asked is not None:
            time.sleep(COLLECT_S)
            self._answer()

    def stand_still(self, scratch: Path, workers: Iterable[WorkerProcess]) -> bool:
        """Return True if a worker has been in one place for long: then its world is broken off since it hangs."""
        now = time.monotonic_ns()
        for worker in workers:
            with suppress(OSError, ValueError):
                reading = worker.reading(scratch)
                if reading is not None and reading.busy_s and now - reading.phase_since_ns > STUCK_RANK_S * 1e9:
                    return True
        return False

    def _request(self) -> str:
        """Return the name of a request that is new and not old; "" if there is none."""
        try:
            descriptor = os.open(
                self._run_dir / STACKS_FOLDER / STACKS_REQUEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            )
        except OSError:
            return ""
        with os.fdopen(descriptor, "rb") as file, suppress(OSError, *NOT_A_REQUEST):
            is_fresh = abs(time.time() - os.fstat(descriptor).st_mtime) < REQUEST_OLD_S
            if is_fresh and stat.S_ISREG(os.fstat(descriptor).st_mode):
                name = json.loads(file.read(MOST_REQUEST_BYTES))["name"]
                if name != self._answered and REQUEST_NAME.fullmatch(name):
                    return str(name)
        return ""

    def _ask(self, name: str, why: str, now: float, scratch: Path, workers: Iterable[WorkerProcess]) -> None:
        self._asked = asked = _Asked(name, why, now + COLLECT_S, [])
        for worker in workers:
            seen = _seen(worker, scratch)
            asked.workers.append(seen)
            if worker.state is not RankState.RUNNING or not worker.pid:
                seen["problem"] = f"it is in no world: {worker.state.name.lower()}"
            elif seen["process"] in STOPPED:
                seen["problem"] = "it is stopped (SIGSTOP), and can say nothing"
            else:
                log = self._run_dir / "logs" / f"worker-{self._node}-{worker.slot}.log"
                with suppress(OSError):
                    asked.logs[worker.pid] = log, log.stat().st_size
                    stacks.ask(worker.pid, wait_s=0.0)

    def _answer(self) -> None:
        asked, self._asked = self._asked, None
        assert asked is not None
        for seen in asked.workers:
            if (found := asked.logs.get(seen["pid"])) is not None:
                path, start = found
                with suppress(OSError), path.open("rb") as log:
                    log.seek(start)
                    seen["stack"] = log.read(MOST_STACK_BYTES).decode(errors="replace")
                if not seen.get("stack"):
                    seen["problem"] = "it did not write its stacks: it waits in the kernel, or has ended"
        with suppress(OSError):  # a full disk must not end the run
            folder = self._run_dir / STACKS_FOLDER / asked.name
            folder.mkdir(parents=True, exist_ok=True)
            answer = NodeStacks(time.time(), self._node, asked.why, asked.workers)
            with atomic_write(folder / f"{self._node}.json") as file:
                file.write(json.dumps(vars(answer), indent=1).encode() + b"\n")


def _seen(worker: WorkerProcess, scratch: Path) -> WorkerStacks:
    """Return what a worker shows without its help: /proc and its heartbeat."""
    seen: WorkerStacks = {
        "rank": worker.rank, "pid": worker.pid, "slot": worker.slot, "generation": worker.generation,
        "process": process_state(worker.pid) if worker.pid else "",
    }  # fmt: skip
    with suppress(OSError, ValueError):
        if (reading := worker.reading(scratch)) is not None:
            since_s = (time.monotonic_ns() - reading.phase_since_ns) / 1e9
            seen |= {"step": reading.step, "phase": reading.phase, "phase_s": round(since_s, 3)}
            seen["collectives"] = dict(reading.sequences)
    return seen


# NCCL's flight recorder: torch keeps the last collectives in a ring buffer, and writes them to a file when a byte comes
# through a named pipe (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, DumpPipe); both are asked for by environment
# variables, so no private function is called. `torchfrtrace`, which comes with torch, reads the files. Gloo has no such
# recorder: there the heartbeat's numbers of collectives begun serve. With TORCH_NCCL_DUMP_ON_TIMEOUT torch would also
# write when its own watchdog times out; Argosy's detectors are earlier.

ENTRIES = 2000
"""Collectives that are kept, a few hundred bytes each."""
PIPE, DUMP = "flight-", "flight/rank-"
"""Prefixes of the names of pipes in the agent's scratch folder, and of files in the run's folder of stacks."""


def flight_environment(stacks: Path, scratch: Path) -> dict[str, str]:
    """Return the variables for a worker on a GPU, without those that are set."""
    wanted = {
        "TORCH_FR_BUFFER_SIZE": str(ENTRIES),
        "TORCH_FR_DUMP_TEMP_FILE": str(stacks / DUMP),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(scratch / PIPE),
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


def ask_flight_recorders(stacks: Path, scratch: Path, ranks: Iterable[int | None]) -> None:
    """Have these ranks write what their recorders hold; without a recorder there is no pipe, and nothing happens."""
    for rank in ranks:
        with suppress(OSError):
            pipe = os.open(scratch / f"{PIPE}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            try:
                (stacks / DUMP).parent.mkdir(parents=True, exist_ok=True)
                os.write(pipe, b"1")
            finally:
                os.close(pipe)
