"""The watch over a step on a GPU: it finds where the host waits, and which streams race.

Streams are checked with vector clocks (Mattern 1989), as ThreadSanitizer checks threads: each stream, and the host,
keeps how far it knows each other to have come. An event carries what a stream knows to whatever waits for it. Two
accesses to one memory, one of which writes, race if neither is known to have happened before the other. torch's own
sanitizer (`torch.cuda._sanitizer`) does this on a GPU; it reads addresses, and fake memory has none.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from torch import Tensor

PACKAGE = f"{Path(__file__).parents[1]}/"
UNTOLD = (f"{PACKAGE}simulate/", f"{PACKAGE}accelerator.py")
"""Places that say nothing: this tool's own, and the one through which all others ask for the device."""
HOST_STREAM = "host"
"""The host's program, as a stream of its own."""
DEFAULT = "default stream"


@dataclass(frozen=True, order=True)
class DeviceFinding:
    """Something that the step does, and the place in the code that does it."""

    part: str
    """Part of the run: "step", "evaluation", ..."""
    where: str
    """File and line within `argosy`."""
    what: str


def place_in_code() -> str:
    """Return the innermost line of Argosy's that runs now, e.g. "training/step.py:212"."""
    outermost = sys._getframe(1)
    frame: FrameType | None = outermost
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) and not file.startswith(UNTOLD):
            return f"{file.removeprefix(PACKAGE)}:{frame.f_lineno}"
        outermost, frame = frame, frame.f_back
    return f"{outermost.f_code.co_filename}:{outermost.f_lineno}"


class DeviceWatch:
    """Counts what is found, and keeps the streams' clocks."""

    def __init__(self) -> None:
        self.part = ""
        """The part of the run that is counted now; "": nothing is."""
        self.host_syncs: Counter[DeviceFinding] = Counter()
        """Waits of the host for the device."""
        self.misplaced: Counter[DeviceFinding] = Counter()
        """Tensors on another device than those that they meet."""
        self.races: Counter[DeviceFinding] = Counter()
        """Accesses of two streams to one memory, with no event between them."""
        self.streams = StreamClocks(self)

    @contextmanager
    def counting(self, part: str) -> Iterator[None]:
        """Count what happens in this block as `part` of the run."""
        self.part = part
        yield
        self.part = ""

    def host_waits(self, what: str) -> None:
        """Note that the host waits until the device has done all it was given."""
        self._note(self.host_syncs, what)
        self.streams.host_waits()

    def wrong_device(self, what: str) -> None:
        self._note(self.misplaced, what, always=True)

    def race(self, what: str) -> None:
        self._note(self.races, what)

    def _note(self, found: Counter[DeviceFinding], what: str, always: bool = False) -> None:
        if self.part or always:
            found[DeviceFinding(self.part or "start", place_in_code(), what)] += 1


class _Memory:
    """The last uses of a piece of memory: stream -> its time, and the place in the code."""

    __slots__ = ("bytes", "home", "kept_for", "reads", "write")

    def __init__(self, home: str, size: int) -> None:
        self.home, self.bytes = home, size
        """The stream that it was allocated in: once it is freed, what comes next there may get it."""
        self.write: tuple[str, int, str] | None = None
        self.reads: dict[str, tuple[int, str]] = {}
        self.kept_for: set[str] = set()
        """Streams that the allocator was told of (`record_stream`): it waits for them before it gives it away."""


Clock = dict[str, int]


class StreamClocks:
    """Each stream's clock: how far it knows the others to have come; and the last uses of memory."""

    def __init__(self, watch: DeviceWatch) -> None:
        self._watch = watch
        self._clocks: dict[str, Clock] = {HOST_STREAM: {}}
        self._memories: dict[int, _Memory] = {}
        self._given_back: dict[str, list[tuple[int, Clock]]] = {}
        """Stream -> what was freed there and used elsewhere: its bytes, and by whom and when."""

    def ran(self, stream: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """An operation is put on `stream` (HOST_STREAM: it is done now)."""
        clock = self._clock(stream)
        _merge(clock, self._clocks[HOST_STREAM])  # the host has put it there after all it knows of
        now = clock[stream] = clock.get(stream, 0) + 1
        where = place_in_code()
        written = {id(tensor.untyped_storage()) for tensor in writes}
        for tensor in reads:
            if id(tensor.untyped_storage()) in written:
                continue
            memory = self._memory(tensor, stream)
            self._check(memory.write, stream, clock, where)
            memory.reads[stream] = now, where
        for tensor in writes:
            memory = self._memory(tensor, stream)
            self._check(memory.write, stream, clock, where)
            for reader, (time, place) in memory.reads.items():
                self._check((reader, time, place), stream, clock, where)
            memory.write, memory.reads = (stream, now, where), {}

    def made(self, tensor: Tensor, stream: str) -> None:
        """Memory is allocated in `stream`."""
        self._memory(tensor, stream)

    def record(self, stream: str) -> Clock:
        """Return what an event that is recorded now carries."""
        return dict(self._clock(stream))

    def wait(self, stream: str, carried: Clock) -> None:
        """Let what is put on `stream` from now on come after what `carried` tells of."""
        _merge(self._clock(stream), carried)

    def host_waits(self, carried: Clock | None = None) -> None:
        """The host waits for what `carried` tells of; None: for all streams."""
        for clock in [carried] if carried is not None else list(self._clocks.values()):
            _merge(self._clocks[HOST_STREAM], clock)

    def keep_for(self, tensor: Tensor, stream: str) -> None:
        """The allocator is told that `stream` uses the memory."""
        self._memory(tensor, stream).kept_for.add(stream)

    def freed(self, key: int) -> None:
        """Memory is given back: what comes next in its home stream may get it."""
        memory = self._memories.pop(key, None)
        if memory is None or memory.home == HOST_STREAM:  # the pinned memory's allocator watches the copies' events
            return
        uses = {reader: time for reader, (time, _) in memory.reads.items()}
        if memory.write is not None:
            uses[memory.write[0]] = max(memory.write[1], uses.get(memory.write[0], 0))
        others = {
            s: time for s, time in uses.items() if s not in (memory.home, HOST_STREAM) and s not in memory.kept_for
        }
        if others:
            self._given_back.setdefault(memory.home, []).append((memory.bytes, others))

    def _given_out(self, stream: str, size: int) -> None:
        """New memory is allocated in `stream`: it may be what others that have it no more still use."""
        clock, left = self._clock(stream), []
        _merge(clock, self._clocks[HOST_STREAM])
        for freed_bytes, uses in self._given_back.pop(stream, ()):
            pending = {other: time for other, time in uses.items() if clock.get(other, 0) < time}
            if pending and size > freed_bytes:
                left.append((freed_bytes, pending))
            elif pending:
                self._watch.race(f"the {stream} gets memory that was freed while the {min(pending)} may still use it")
        if left:
            self._given_back[stream] = left

    def _check(self, before: tuple[str, int, str] | None, stream: str, clock: Clock, where: str) -> None:
        if before is None:
            return
        other, time, place = before
        if other != stream and clock.get(other, 0) < time:
            self._watch.race(f"the {stream} uses what the {other} does at {place}, with no event between")

    def _clock(self, stream: str) -> Clock:
        return self._clocks.setdefault(stream, {})

    def _memory(self, tensor: Tensor, stream: str) -> _Memory:
        storage = tensor.untyped_storage()
        key = id(storage)  # the same Python object for as long as its memory lives
        if key not in self._memories:
            is_on_device = tensor.device.type != "cpu"
            self._memories[key] = _Memory(stream if is_on_device else HOST_STREAM, storage.nbytes())
            if is_on_device:
                self._given_out(stream, storage.nbytes())
            weakref.finalize(storage, self.freed, key).atexit = False
        return self._memories[key]


def _merge(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time
