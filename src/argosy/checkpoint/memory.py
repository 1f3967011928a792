"""In-memory checkpoints: the state in host memory, for what no live replica has (GEMINI: Wang et al., SOSP 2023).

Every so many steps (`training.saving`) each rank writes the boxes that it keeps into a shard file in a
folder in memory (/dev/shm), which belongs to the node's agent and outlives the worker, and sends the file to a rank of
the next node, which outlives the node. A file is written under a temporary name; its final name has step and checksum.
Two steps are kept, and the older is overwritten only when all ranks have the newer.

Placement: if all boxes of a state are held on two nodes or more, nothing is saved, since a live replica is newer than
any in-memory checkpoint. That holds where a survivor of a lost peer lives on, as it does on CPUs. On GPUs it may not: a
collective that the abort of its communicator does not end holds the process until it is killed, and one lost device can
hold all that wait for it, on every node. So there in-memory checkpoints are saved whatever the replicas. If they are
saved, then every box, since going back to a step takes all of its state: one of its holders keeps it (they are dealt
out evenly), and so does the next node in the ring of nodes. On a single node only the holder does.
"""

from __future__ import annotations

import mmap
import os
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from argosy.checkpoint.boxes import Box
from argosy.checkpoint.directory import Transfer, deal, have_all_two
from argosy.checkpoint.exchange import CorruptMessage, carry, travels
from argosy.checkpoint.history import History, Position, from_metadata, to_metadata
from argosy.checkpoint.shards import ShardFile, write_shard
from argosy.files import PARTIAL
from argosy.parallel.encoding import decode, encode
from argosy.parallel.peers import Peers, Talk, over, peers_of
from argosy.parallel.world import World, group_in_host_memory

MEMORY_VARIABLE = "ARGOSY_MEMORY"
"""Environment variable: the folder of this node's in-memory checkpoints; the agent makes and removes it."""
NODE_VARIABLE = "ARGOSY_NODE"
"""Environment variable: name of this node; the host's if it is not set."""
PART_WAIT_S = 60.0
"""Longest wait of a rank for another's part; then no more in-memory checkpoints are saved in this world."""
READ_BYTES = 16 * 2**20
_MEMORY_NAME = re.compile(r"(?P<world>[0-9a-f]+)\.(?P<step>\d{8,})\.(?P<rank>\d{5,})\.(?P<crc>[0-9a-f]{8})")


def memory_folder() -> Path | None:
    """Return the folder of this node's in-memory checkpoints; None if no agent offers one."""
    folder = os.environ.get(MEMORY_VARIABLE)
    return Path(folder) if folder else None


def node_name() -> str:
    """Return the name of the node that this process is on."""
    return os.environ.get(NODE_VARIABLE) or socket.gethostname()


@dataclass(frozen=True)
class Placement:
    """One rank's side of the in-memory checkpoints of its world."""

    kept: tuple[Box, ...] = ()
    """The boxes that it keeps."""
    mirror: int | None = None
    """The rank of the next node that keeps them too; None: none does."""
    guests: tuple[int, ...] = ()
    """The ranks whose mirror it is, if they keep anything."""
    is_needed: bool = False
    """True if any rank keeps anything."""


def place(peers: Peers, node: str, held: Collection[Box], replicas_may_hang: bool = False) -> Talk[Placement]:
    """Deal the boxes out over the ranks, given this rank's node and what it holds (see the top of this file)."""
    boxes = [box for box in held if travels(box)]
    if not replicas_may_hang and (yield from have_all_two(peers, boxes, node)):
        return Placement()
    kept = yield from deal(peers, boxes)
    is_needed = yield from peers.merge(bool(kept), bool, lambda one, other: one or other)
    mirror = yield from _mirror(peers, node)
    guests = yield from peers.route([(mirror, b"")] if mirror is not None and kept else [])
    return Placement(tuple(kept), mirror, tuple(letter.sender for letter in guests), is_needed)


def _mirror(peers: Peers, node: str) -> Talk[int | None]:
    """Return this rank's counterpart on the next node in the ring: nodes come in the order of their first ranks."""
    here = yield from peers.alike(node)
    mine = 1 << here[0]
    firsts = int((yield from peers.merge(hex(mine), str, lambda one, other: hex(int(one, 16) | int(other, 16)))), 16)
    later = firsts & -(mine << 1) or firsts
    following = (later & -later).bit_length() - 1
    asked = yield from peers.route([(following, b"")])
    (answer,) = yield from peers.route((x.sender, encode(here, list[int])) for x in asked)
    there: list[int] = decode(answer.data, list[int], f"rank {following}")
    return None if there == here else there[here.index(peers.rank) % len(there)]


@dataclass(frozen=True)
class MemoryCheckpoint:
    """The file of one rank's part of an in-memory checkpoint."""

    path: Path
    world: str
    """Name of the world that saved it (`History.world`)."""
    step: int
    """Optimizer steps done."""
    rank: int
    """Rank that kept it, in that world."""
    crc: int

    def is_whole(self) -> bool:
        """True if it is, to the bit, what was written. Reads all of it."""
        try:
            return _crc_of(self.path) == self.crc
        except OSError:
            return False

    @cached_property
    def file(self) -> ShardFile:
        """Its tensors. Raises: OSError, SafetensorError if it is no shard file."""
        return ShardFile(self.path)

    @cached_property
    def state(self) -> tuple[Position, History] | None:
        """Position and history of the state; None if they cannot be read."""
        try:
            return from_metadata(self.file.about)
        except (OSError, SafetensorError, KeyError, ValueError):
            return None


def memory_checkpoints_in(folder: Path | None) -> list[MemoryCheckpoint]:
    """Return the finished in-memory checkpoints in a folder, whole or not, in a fixed order."""
    if folder is None or not folder.is_dir():
        return []
    found = [(path, _MEMORY_NAME.fullmatch(path.name)) for path in sorted(folder.iterdir())]
    return [
        MemoryCheckpoint(path, m["world"], int(m["step"]), int(m["rank"]), int(m["crc"], 16)) for path, m in found if m
    ]


class MemoryCheckpointer:
    """Saves the in-memory checkpoints of one world. All its ranks call it alike; one save is in flight at a time."""

    def __init__(
        self,
        folder: Path,
        boxes: Sequence[Box],
        world: World,
        history: History,
        failed: Callable[[str], None],
    ):
        """`boxes`: those this rank holds. `failed` is told why a save failed, by the thread that waits for it."""
        self._folder, self._rank, self._history, self._failed = folder, world.rank, history, failed
        # A group of its own: its messages must not meet those of a step, and a rank waits less long for a lost one.
        self._group = group_in_host_memory(world.device, PART_WAIT_S) if world.size > 1 else None
        self._peers = peers_of(self._group)
        placement = over(self._group, place(self._peers, node_name(), boxes, world.device.type != "cpu"))
        self._kept, self._mirror, self._guests = placement.kept, placement.mirror, placement.guests
        self._thread: threading.Thread | None = None
        self._problem: str | None = None
        self.is_on = placement.is_needed
        """True while in-memory checkpoints are needed, and nothing has gone wrong for good."""
        self.step: int | None = None
        """Step of the newest that all ranks have."""
        self.stall_s: float | None = None
        """Seconds that the newest held up training, on the rank that it held up most."""

    def save(self, position: Position, tensors: Mapping[Box, Tensor]) -> None:
        """Save the state. Returns when this rank's part is copied; the rest is in the background.

        `tensors`: those of the boxes that this rank holds.
        """
        began = time.monotonic()
        self.wait()
        if not self.is_on:
            return
        problem = None
        try:
            if self._kept:
                about = to_metadata(position, self._history)
                with _opened(self._recycled(self._rank)) as file:
                    write_shard(file, tensors, about, self._kept)
        except OSError as error:
            problem = str(error)  # the other ranks must hear of it, so it travels through what follows
        finish = partial(self._finish, position.step, time.monotonic() - began, problem)
        thread = threading.Thread(target=finish, name="argosy-memory", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there can be no more threads; the other ranks count on this one
            finish()
        else:
            self._thread = thread

    def wait(self) -> None:
        """Wait for the save in flight, if any, and report if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._problem is not None:
            self._failed(self._problem)
            self._problem = None

    def abandon(self) -> None:
        """Let go of the save in flight: its world is over."""
        if self._thread is not None:
            self._thread.join()
        self._thread, self._problem = None, None

    def close(self) -> None:
        """Close its group, which else stays until the world ends. No save may be in flight, on any rank."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _finish(self, step: int, stall_s: float, problem: str | None) -> None:
        """Send and receive; then give the files their final names, and remove those of earlier worlds."""
        try:
            self.stall_s = self._all_have(step, stall_s, problem)
            self.step = step
            for path in self._folder.iterdir():  # left by worlds before this one, whose state is older now
                if not path.name.startswith(f"{self._history.world}."):
                    path.unlink(missing_ok=True)
        except CorruptMessage as error:
            self._problem = str(error)  # the same on all ranks; the next save may succeed
        except Exception as error:  # no room, or a rank or the world is gone: none of that may end training
            self._problem, self.is_on = f"{error}; no more in-memory checkpoints are saved in this world", False

    def _all_have(self, step: int, stall_s: float, problem: str | None) -> float:
        """Exchange the files, and give them their final names. Returns the longest time that any rank stood still.

        Raises: OSError if a rank lacks room, CorruptMessage, RuntimeError if a rank is gone.
        """
        path, size, crc = self._partial(self._rank), 0, 0
        if self._kept and problem is None:
            size, crc = path.stat().st_size, _crc_of(path)
        stall_s = self._agree(problem, stall_s)
        files = {self._rank: (size, crc)} | self._files_of_guests(size, crc)
        problem, mine, transfers = None, _file_box(self._rank, size), []
        held, wanted = {}, {}
        if self._mirror is not None and size:
            held[mine] = _pages(path, mmap.ACCESS_COPY)
            transfers.append(Transfer(self._rank, self._mirror, mine, mine, mine))
        try:
            for rank in self._guests:
                guest, box = self._recycled(rank), _file_box(rank, files[rank][0])
                with _opened(guest) as file:
                    os.ftruncate(file, files[rank][0])
                    os.posix_fallocate(file, 0, files[rank][0])  # or a page that cannot be had would be a SIGBUS
                wanted[box] = _pages(guest, mmap.ACCESS_WRITE)
                transfers.append(Transfer(rank, self._rank, box, box, box))
        except OSError as error:
            problem = str(error)
        self._agree(problem)
        carry(transfers, held, wanted, self._group)
        for rank, (size, crc) in files.items():
            if size:
                self._partial(rank).rename(self._folder / f"{self._history.world}.{step:08d}.{rank:05d}.{crc:08x}")
        self._agree(None)
        return stall_s

    def _files_of_guests(self, size: int, crc: int) -> dict[int, tuple[int, int]]:
        """Return size and checksum of what each guest keeps, and tell the mirror of this rank's."""
        kind = tuple[int, int]
        letters = [] if self._mirror is None else [(self._mirror, encode((size, crc), kind))]
        told = over(self._group, self._peers.route(letters if size else []))
        return {letter.sender: decode(letter.data, kind, f"rank {letter.sender}") for letter in told}

    def _agree(self, problem: str | None, seconds: float = 0.0) -> float:
        """Return the largest of what all ranks give, if none has a problem. Raises: OSError, the same on all ranks."""
        said = (problem or "", seconds)
        first, most_s = over(
            self._group,
            self._peers.merge(said, tuple[str, float], lambda x, y: (max(x[0], y[0]), max(x[1], y[1]))),
        )
        if first:
            raise OSError(first)
        return most_s

    def _recycled(self, rank: int) -> Path:
        """Return the file for the next save of what `rank` keeps: the older of two, whose pages need no clearing.

        All ranks have the newer one: `save` has waited for that.
        """
        path = self._partial(rank)
        mine = [
            saved
            for saved in memory_checkpoints_in(self._folder)
            if (saved.world, saved.rank) == (self._history.world, rank)
        ]
        if len(mine) > 1:
            min(mine, key=lambda saved: saved.step).path.rename(path)
        return path

    def _partial(self, rank: int) -> Path:
        return self._folder / f"{self._history.world}.{rank:05d}{PARTIAL}"


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file to write to, as it is, or a new one."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _pages(path: Path, access: int) -> Tensor:
    """Map a file's bytes."""
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=access), dtype=torch.uint8)


def _file_box(rank: int, size: int) -> Box:
    """Return the box of the file of what `rank` keeps, to exchange it."""
    return Box(f"in-memory checkpoint of rank {rank}", "uint8", (size,), (0,), (size,))


def _crc_of(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            crc = zlib.crc32(block, crc)
    return crc
