"""A worker's heartbeat: a page of memory in which it shows its progress to its agent, without locks or system calls.

The loop writes what it does (generation, step, the phase and when it began, how long its own work took, and what it
counts: `observe.counters`) with plain stores. A thread, `argosy-beat`, writes every 0.1 s that the process lives, and
how many collectives each process group has begun. When the process is stopped, or holds Python's lock for ever, the
beat stops; when it is dead, the page can still be read.

The file belongs in memory (/dev/shm): on a disk a store may wait while the kernel writes the page back. This module
does not import torch, since its readers have none.
"""

from __future__ import annotations

import mmap
import os
import resource
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Literal, get_args

from argosy.files import open_regular
from argosy.observe import counters
from argosy.observe.counters import Communication, Counters

Phase = Literal[
    "starting", "recovering", "waiting", "data", "forward", "backward", "pipeline", "communication", "optimizer",
    "check", "evaluate", "checkpoint", "finishing", "other", "user",
]  # fmt: skip
"""The phase of a worker. starting: until its first step; recovering: taking state from other ranks or from disk;
waiting: for a world to join; finishing: the last save and the report; communication: what backward did not hide;
pipeline: forward and backward where they interleave; check: the replay check of another rank's gradient; user: code of
the user's."""

PHASES: tuple[Phase, ...] = get_args(Phase)
BESIDE: tuple[Phase, ...] = ("check", "evaluate", "checkpoint")
"""Phases that come now and then, and do not count as part of a step."""
HEARTBEAT_S = 0.1
HEARTBEAT_FORMAT = 6
HEARTBEAT_MAGIC = int.from_bytes(b"ARGOSYVT", "little")
LAST_STEPS = 64
"""The page remembers how long this many of the last steps took."""
GROUPS = 32
"""The page has room for this many process groups; a rank is in far fewer."""
NAME_BYTES = 56
READ_TRIES = 100
"""A reader tries this often to read between two writes; then it takes what it read."""

# The page, in words of 8 bytes. Two writers, hence two parts, each with a version that is odd while it is written.
MAGIC_AT, FORMAT_AT, PID_AT = range(3)
(
    LOOP_VERSION_SLOT,
    GENERATION_SLOT,
    RANK_SLOT,
    STEP_SLOT,
    PHASE_SLOT,
    PHASE_SINCE_SLOT,
    SAFE_STEP_SLOT,
    SUSPICIONS_SLOT,
) = range(8, 16)
TOOK = 16  # LAST_STEPS times: step, nanoseconds, microbatches
TOOK_WORDS = 3
COUNTERS = TOOK + TOOK_WORDS * LAST_STEPS
BEAT = COUNTERS + counters.COUNTER_WORDS
BEAT_VERSION, BEATS, PEAK_MEMORY, GROUP_COUNT = range(BEAT, BEAT + 4)
GROUP_SLOT = BEAT + 8  # GROUPS times: sequence number, name
GROUP_WORDS = 1 + NAME_BYTES // 8
HEARTBEAT_WORDS = GROUP_SLOT + GROUPS * GROUP_WORDS

Sequences = Callable[[], Mapping[str, int]]
"""Gives how many collectives each process group has begun, by its name, which is the same on all its ranks."""


NO_FACTS: Mapping[str, Any] = MappingProxyType({})
NOTHING_YET = Counters()


def heartbeat_path(folder: Path, pid: int) -> Path:
    """Return the file that the process `pid` of this machine writes, if `folder` was given to it."""
    return folder / f"worker-{pid}.heartbeat"


def thinned(steps: list[int], most: int) -> list[int]:
    """Return at most so many of the steps: the multiples of a power of two, which are the same on all nodes."""
    stride = 1
    while len(steps) > most:
        stride *= 2
        steps = [step for step in steps if step % stride == 0]
    return steps


class Heartbeat:
    """The worker's side. Only the loop's thread calls its methods; none of them waits for anything."""

    def __init__(self, folder: Path):
        """Raises: FileNotFoundError if `folder` is gone: the agent that made it has ended, and it must not come back;
        OSError if it has no room.
        """
        self.path = heartbeat_path(folder, os.getpid())
        fresh = self.path.with_suffix(".partial")
        with fresh.open("wb+") as file:
            _take_room(file, 8 * HEARTBEAT_WORDS)
            self._page = mmap.mmap(file.fileno(), 8 * HEARTBEAT_WORDS)
        self._words = memoryview(self._page).cast("q")  # a store of an aligned word is never seen half done
        self._words[PID_AT], self._words[FORMAT_AT], self._words[MAGIC_AT] = (
            os.getpid(),
            HEARTBEAT_FORMAT,
            HEARTBEAT_MAGIC,
        )
        self._words[RANK_SLOT] = self._words[STEP_SLOT] = self._words[SAFE_STEP_SLOT] = -1
        self._forget_steps()
        self._sequences: Sequences = dict
        self.enter("starting")
        self._beat()
        fresh.replace(self.path)  # a reader that finds the file finds it filled in
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="argosy-beat", daemon=True)
        self._thread.start()

    def join(self, generation: int, rank: int, sequences: Sequences) -> None:
        """Show that this process is now `rank` of the world of `generation`.

        The beat's thread calls `sequences` every 0.1 s; it may fail while groups are made or closed. The steps of the
        world before are forgotten, and the phase is recovering.
        """
        self._sequences = sequences
        words = self._words
        words[LOOP_VERSION_SLOT] += 1
        words[GENERATION_SLOT], words[RANK_SLOT], words[STEP_SLOT], words[SAFE_STEP_SLOT] = generation, rank, -1, -1
        self._forget_steps()
        words[LOOP_VERSION_SLOT] += 1
        self.enter("recovering")

    def enter(self, phase: Phase) -> None:
        """Show that the loop is now in `phase`."""
        words = self._words
        words[LOOP_VERSION_SLOT] += 1
        words[PHASE_SLOT] = _NUMBER[phase]
        words[PHASE_SINCE_SLOT] = time.monotonic_ns()
        words[LOOP_VERSION_SLOT] += 1

    def advance(self) -> None:
        """Show that the loop gets on with its phase: one that works in batches calls this before each."""
        self.enter(PHASES[self._words[PHASE_SLOT]])

    def begin(self, step: int) -> None:
        self._words[STEP_SLOT] = step

    def can_go_back_to(self, step: int) -> None:
        """Show that the steps before `step` are safe: the run would not lose them, whatever is lost now."""
        self._words[SAFE_STEP_SLOT] = step

    def suspect(self) -> None:
        """Count that what this process computed or holds was found wrong, or may be wrong."""
        self._words[SUSPICIONS_SLOT] += 1

    def took(
        self,
        busy_s: float,
        seconds: Mapping[str, float] = NO_FACTS,
        communication: Communication = NO_FACTS,
        memory_bytes: int = 0,
        microbatches: int = 1,
    ) -> None:
        """Show that the last step took `busy_s` seconds of this process's own work, without waits for other ranks.

        seconds: of each category, communication: by axis and tier, as `StepClock.lap` gives them; memory_bytes: the
        peak so far. They are added to what was counted in this world. microbatches: how many it ran.
        """
        words = self._words
        step = words[STEP_SLOT]
        if step < 0:
            return
        slot = TOOK + TOOK_WORDS * (step % LAST_STEPS)
        words[LOOP_VERSION_SLOT] += 1
        words[slot], words[slot + 1], words[slot + 2] = step, round(busy_s * 1e9), microbatches
        counters.add_step(words, COUNTERS, step, seconds, communication, memory_bytes)
        words[LOOP_VERSION_SLOT] += 1

    def has_written(self, checkpoint_bytes: int) -> None:
        """Show how many bytes of checkpoints this process has written in this world."""
        self._words[COUNTERS + counters.WRITTEN_SLOT] = checkpoint_bytes

    def stop(self) -> None:
        """End the beat; the file stays, and can be read."""
        self._closed.set()
        self._thread.join()
        self._words.release()
        self._page.close()

    def close(self) -> None:
        self.stop()
        self.path.unlink(missing_ok=True)

    def _forget_steps(self) -> None:
        for slot in range(LAST_STEPS):
            self._words[TOOK + TOOK_WORDS * slot] = -1
        counters.clear(self._words, COUNTERS)

    def _keep_beating(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            self._beat()

    def _beat(self) -> None:
        sequences: Mapping[str, int] | None = None
        with suppress(Exception):  # a group was just closed: the next beat has those that are left
            sequences = self._sequences()
        words = self._words
        words[BEAT_VERSION] += 1
        words[BEATS] += 1
        words[PEAK_MEMORY] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if sequences is not None:
            self._write_sequences(sequences)
        words[BEAT_VERSION] += 1

    def _write_sequences(self, sequences: Mapping[str, int]) -> None:
        some = list(sequences.items())[:GROUPS]
        for number, (name, sequence) in enumerate(some):
            at = GROUP_SLOT + number * GROUP_WORDS
            self._words[at] = sequence
            self._page[8 * (at + 1) : 8 * (at + GROUP_WORDS)] = name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
        self._words[GROUP_COUNT] = len(some)


class UnreadHeartbeat(Heartbeat):
    """The heartbeat of a process without an agent. It has neither a file nor a thread, and nobody reads it."""

    def __init__(self) -> None:
        self._words = memoryview(bytearray(8 * HEARTBEAT_WORDS)).cast("q")
        self._words[STEP_SLOT] = -1
        self._forget_steps()

    def join(self, generation: int, rank: int, sequences: Sequences) -> None:
        """Do nothing: nobody reads it in the new world either."""

    def stop(self) -> None:
        """Do nothing: there is no thread."""

    def close(self) -> None:
        """Do nothing: there is no thread and no file."""


_NUMBER = {phase: number for number, phase in enumerate(PHASES)}

UNREAD = UnreadHeartbeat()
"""The heartbeat of a process without an agent."""


@dataclass(frozen=True)
class HeartbeatReading:
    """A worker's heartbeat at one moment. Times are its machine's CLOCK_MONOTONIC, in nanoseconds."""

    pid: int
    generation: int
    rank: int
    """-1 until it has joined a world."""
    step: int
    """The step that it is in, or did last; -1 before its first step in this world."""
    phase: Phase
    phase_since_ns: int
    busy_s: Mapping[int, float]
    """Step -> seconds of the worker's own work, for its last steps."""
    beats: int
    """Grows by one every `HEARTBEAT_S` while the process runs."""
    peak_memory_bytes: int
    """The peak of resident memory."""
    sequences: Mapping[str, int]
    """Process group -> number of collectives that this process has begun in it."""
    safe_step: int = -1
    """Steps in the newest checkpoint, in memory or on disk, that all ranks have their part of; -1: none is known."""
    suspicions: int = 0
    """Times that its numbers were found wrong, or suspected to be, since it started."""
    counted: Counters = NOTHING_YET
    """Its counts in this world."""
    microbatches: Mapping[int, int] = field(default_factory=dict)
    """Step -> how many microbatches it ran, for the steps of `busy_s`; 1 if it does not say."""

    @property
    def progress(self) -> Hashable:
        """A value that changes as long as the process gets on with its work."""
        return self.step, self.phase, self.phase_since_ns, tuple(self.sequences.items())


def _take_room(file: BinaryIO, size: int) -> None:
    """Make `file` `size` bytes long and reserve the memory: without it the first write to a page that cannot be had is
    a SIGBUS, which explains nothing. Raises: OSError.
    """
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as problem:
        raise OSError(problem.errno, os.strerror(problem.errno or 0), file.name) from None


def read_heartbeat(path: Path) -> HeartbeatReading | None:
    """Return what the worker that writes this file shows now; None if there is no file (yet).

    A worker that was stopped or killed while it wrote leaves a part half written for ever. It is read as it is: each
    number is whole in itself.

    Raises: ValueError if the file is no heartbeat, or one of another version.
    """
    try:
        with open_regular(path) as file:
            page = mmap.mmap(file.fileno(), 8 * HEARTBEAT_WORDS, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        return None
    except ValueError:  # mmap: the file is too short
        raise ValueError(f"{path} is no heartbeat") from None
    with page, memoryview(page) as view, view.cast("q") as words:
        if words[MAGIC_AT] != HEARTBEAT_MAGIC or words[FORMAT_AT] != HEARTBEAT_FORMAT:
            raise ValueError(f"{path} is no heartbeat of format {HEARTBEAT_FORMAT}")
        loop = _consistent(words, LOOP_VERSION_SLOT, slice(0, BEAT))
        beat = _consistent(words, BEAT_VERSION, slice(0, HEARTBEAT_WORDS))
    return _reading(loop, beat)


def _consistent(words: memoryview, version: int, part: slice) -> list[int]:
    """Return a copy of `part` that was not written to meanwhile, or after `READ_TRIES` readings the last one."""
    for _ in range(READ_TRIES):
        before = words[version]
        copy = words[part].tolist()
        if before % 2 == 0 and words[version] == before:
            break
    return copy


def _reading(loop: list[int], beat: list[int]) -> HeartbeatReading:
    words = range(TOOK, TOOK + TOOK_WORDS * LAST_STEPS, TOOK_WORDS)
    took = sorted((loop[at], loop[at + 1], loop[at + 2]) for at in words if loop[at] >= 0)
    groups = range(GROUP_SLOT, GROUP_SLOT + min(beat[GROUP_COUNT], GROUPS) * GROUP_WORDS, GROUP_WORDS)
    return HeartbeatReading(
        pid=loop[PID_AT],
        generation=loop[GENERATION_SLOT],
        rank=loop[RANK_SLOT],
        step=loop[STEP_SLOT],
        phase=PHASES[loop[PHASE_SLOT]],
        phase_since_ns=loop[PHASE_SINCE_SLOT],
        busy_s={step: ns / 1e9 for step, ns, _ in took},
        microbatches={step: many for step, _, many in took},
        beats=beat[BEATS],
        peak_memory_bytes=beat[PEAK_MEMORY],
        safe_step=loop[SAFE_STEP_SLOT],
        suspicions=loop[SUSPICIONS_SLOT],
        counted=counters.read(loop, COUNTERS),
        sequences={_name(beat[at + 1 : at + GROUP_WORDS]): beat[at] for at in groups},
    )


def _name(words: list[int]) -> str:
    raw = b"".join(word.to_bytes(8, "little", signed=True) for word in words)
    return raw.rstrip(b"\0").decode(errors="replace")
