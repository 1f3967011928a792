"""The processes of a run: which of them this is, on which device, and how it breaks off what joins them.

No process may wait for a dead peer. Collectives on GPUs wait inside kernels, over NVLink or InfiniBand, where no socket
is that could be shut: their process groups are aborted (`ProcessGroup.abort`, ncclCommAbort), which ends the kernels on
this process's device. Those in host memory wait for TCP connections, which are shut. torch's `shrink_group` is no
substitute: all survivors call it together once they have agreed on who is lost, and it keeps the layout of the rest; a
new world may grow, or have another plan.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import gc
import os
import socket
import sys
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore

from argosy.accelerator import CPU, NCCL, backend_of, is_accelerator, nccl_part, type_here, use
from argosy.config.launch import LaunchConfig
from argosy.faults import fault
from argosy.parallel.encoding import ErrorRecord, checked_length, decode, encode
from argosy.plan.hardware.local_machine import cores_here
from argosy.processes.child import ChannelClosed, channel_to_parent
from argosy.processes.connection import BACKLOG, listener_of
from argosy.processes.fork_server import STORE_HOST

ABORTED = frozenset({NCCL})
"""Backends whose process groups are aborted. Not gloo's: that wakes nobody (see `break_off`), and shutting does."""


class Connections:
    """The connections that this process has opened since this object was made, in one world after the other."""

    def __init__(self, aborted: Collection[str] = ABORTED) -> None:
        self._others = frozenset(name for name, _ in tcp_sockets())
        self._broken: dict[str, socket.socket] = {}
        self._backends, self._aborted = aborted, WeakSet[dist.ProcessGroup]()
        self._aborting: threading.Thread | None = None

    def break_off(self) -> None:
        """End all connections, so that a wait for a peer raises in any thread. May be called again for new ones.

        After an abort, a collective on a GPU returns, with numbers that mean nothing; the next one raises. Whoever uses
        such numbers asks first if the world is over.
        """
        self._abort_groups()
        self._shut_sockets()

    def _abort_groups(self) -> None:
        """Abort the process groups that wait on devices; in a thread, since an abort may itself take long."""
        if self._aborting is not None and self._aborting.is_alive():
            return
        groups = [group for group in _process_groups(self._backends) if group not in self._aborted]
        if groups:
            self._aborted.update(groups)
            self._aborting = threading.Thread(target=_abort, args=(groups,), name="argosy-abort", daemon=True)
            self._aborting.start()

    def _shut_sockets(self) -> None:
        """Shut the connections for reading.

        A gloo collective that waits for a stopped or unreachable peer ends only by its timeout: torch 2.13's
        ProcessGroup.abort does not wake it. The end of its connection does, but it does not wake a sender whose message
        could not be sent at once (gloo's Pair::signalException passes it over). So connections are shut for reading
        only, and kept open: a message to a peer that breaks off too is sent, though no process reads it.
        """
        for name, copy in tcp_sockets():
            # Listening sockets stay: gloo's thread takes their end for its own mistake, and aborts the process.
            is_listening = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not (is_listening or name in self._others or name in self._broken):
                with suppress(OSError):  # not connected
                    copy.shutdown(socket.SHUT_RD)
                    self._broken[name] = copy.dup()

    def close(self) -> None:
        """Close the connections that were broken off, once all processes have left the world."""
        for connection in self._broken.values():
            connection.close()
        self._broken.clear()


def _process_groups(backends: Collection[str]) -> list[dist.ProcessGroup]:
    """Return the process groups of these backends, the newest first. torch has no public name for all groups."""
    names = dict(dist.distributed_c10d._world.pg_names)
    newest_first = sorted(names, key=lambda group: int(names[group]) if names[group].isdigit() else 0, reverse=True)
    found = []
    for group in newest_first:
        with suppress(ValueError, RuntimeError):  # it is being made, or destroyed
            if dist.get_backend(group) in backends:
                found.append(group)
    return found


def _abort(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort `groups` as one: NCCL's aborts of several communicators may wait for each other (pytorch issue 119797)."""
    together = next((some for some in map(nccl_part, groups) if some is not None), None)
    if together is not None:
        together._group_start()
    for group in groups:
        with suppress(RuntimeError):  # it has failed already
            group.abort()
    if together is not None:
        together._group_end()


def tcp_sockets() -> Iterator[tuple[str, socket.socket]]:
    """Yield this process's sockets with the kernel's names, e.g. "socket:[4711]"; each a copy, closed after use."""
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            name = str(entry.readlink())
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6):
                        yield name, copy


T = TypeVar("T")
HOST_TIMEOUT_S = 600.0
"""Longest wait of a rank in a world of GPUs for another's message in host memory."""
STORE_FILE = "ARGOSY_STORE_FILE"
"""Environment variable: the file at which the members of a world meet; without it, MASTER_ADDR and MASTER_PORT."""
LAZY = "TORCH_GLOO_LAZY_INIT"
"""torch's environment variable (ProcessGroupGloo.cpp); it is read when a group is made."""
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h


@dataclass(frozen=True)
class World:
    """This process among all of a run. A world of one needs no process group, and its collectives do nothing."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    host: dist.ProcessGroup | None = None
    """The group of all ranks for tensors in host memory, in a world of GPUs."""

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        """Group of all ranks for tensors in host memory; None for a single rank."""
        if self.size == 1:
            return None
        return self.host or dist.group.WORLD

    @property
    def is_first(self) -> bool:
        """True for rank 0, which speaks for the run: it prints, writes metrics and commits checkpoints."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, said: bool) -> bool:
        """Return True on all processes if `said` is True on any."""
        return self.sum(torch.tensor(float(said), device=self.device)).item() != 0

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        """Return the sum of an array over all processes."""
        return self.sum(torch.from_numpy(array).to(self.device)).cpu().numpy()

    def gather(self, mine: T, kind: Any) -> list[T]:
        """Return what each process gives, by rank: values of the type `kind` (`parallel.encoding`).

        Raises: TypeError if `mine` is of another type, WrongMessage if what another process gave is.
        """
        if self.size == 1:
            return [mine]
        data = encode(mine, kind)
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        lengths[self.rank] = len(data)
        dist.all_reduce(lengths)
        longest = checked_length(int(lengths.max()), "a rank")
        everyone = torch.zeros(self.size, longest, dtype=torch.uint8, device=self.device)
        dist.all_gather(list(everyone), _bytes(data, longest).to(self.device))
        said = everyone.cpu().numpy()
        return [decode(said[r, :n].tobytes(), kind, f"rank {r}") for r, n in enumerate(lengths.tolist())]

    def share_first(self, look: Callable[[], T], kind: Any) -> T:
        """Return to all processes what `look` returns on rank 0, which alone calls it: a value of the type `kind`.

        Raises: what `look` does, on all processes; an error that is not Argosy's own as FailedElsewhere on the others.
        """
        if self.size == 1:
            return look()
        data = b""
        found: Any = None
        problem: Exception | None = None
        if self.is_first:
            try:
                found = look()
                data = encode((found, None), tuple[kind | None, ErrorRecord | None])
            except Exception as error:
                problem = error
                data = encode((None, ErrorRecord.of(error)), tuple[kind | None, ErrorRecord | None])
        length = torch.tensor(len(data), dtype=torch.int64, device=self.device)
        dist.broadcast(length, src=0)
        frame = _bytes(data, checked_length(int(length), "rank 0")).to(self.device)
        dist.broadcast(frame, src=0)
        if problem is not None:
            raise problem
        if not self.is_first:
            sent = frame.cpu().numpy().tobytes()
            found, record = decode(sent, tuple[kind | None, ErrorRecord | None], "rank 0")
            if record is not None:
                raise record.error()
        first: T = found
        return first

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def _bytes(data: bytes, length: int) -> Tensor:
    """Return `data` as a tensor of `length` bytes, filled up with zeros."""
    tensor = torch.zeros(length, dtype=torch.uint8)
    if data:
        tensor[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return tensor


@dataclass(frozen=True)
class WorldSeat:
    """A process's place in a world to join, whose rendezvous store is open already."""

    rank: int
    size: int
    local_rank: int
    """Its number among the processes of its node."""
    local_size: int
    host: str = ""
    """The host of the store."""
    port: int | None = None
    file: str = ""
    """The file that is the store, if all members are on this machine."""

    def environment(self) -> dict[str, str]:
        """Return the environment that `join_world` reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            STORE_FILE: self.file,
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's way to say that the store is there already
        }


def join_world(launch: LaunchConfig) -> World:
    """Join the processes that the environment names (RANK, WORLD_SIZE, MASTER_ADDR, ...; torchrun's and ours).

    Raises: DistError if a member does not come.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    fault("join", rank=rank)
    device = _device(launch)
    if device.type == "cpu":
        keep_freed_memory()
    torch.set_num_threads(threads_per_process(launch, processes_here(size)))
    file = os.environ.get(STORE_FILE, "")
    dist.init_process_group(
        backend_of(device),
        store=_file_store(file) if file else None,
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=launch.timeout_s),
        device_id=device if is_accelerator(device) else None,
    )
    is_host_group_needed = is_accelerator(device) and size > 1
    return World(rank, size, device, group_in_host_memory(device, HOST_TIMEOUT_S) if is_host_group_needed else None)


def _file_store(path: str) -> dist.FileStore:
    """Open the store in a file. It is never destroyed: torch then writes to the file once more, and ends the process
    with an error if that was closed by the agent meanwhile.
    """
    store = dist.FileStore(path, -1)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    return store


def group_in_host_memory(device: torch.device, timeout_s: float) -> dist.ProcessGroup:
    """Make a group of all ranks for tensors in host memory, beside those of `device`; all ranks call it together.

    On GPUs each rank connects only to those that it speaks to, when it does: otherwise gloo connects each with each. On
    CPUs, where gloo's own world has connected each with each already, it does so here too: a wait for a peer that has
    not connected yet has no socket that could be shut (`parallel.world`), and ends by its timeout only.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    if device.type == "cpu":
        return dist.new_group(backend="gloo", timeout=timeout)
    before = os.environ.get(LAZY)
    os.environ[LAZY] = "1"
    try:
        return dist.new_group(backend="gloo", timeout=timeout)
    finally:
        os.environ.pop(LAZY)
        if before is not None:
            os.environ[LAZY] = before


def leave_world() -> None:
    """Close the process groups of this world, so that the process may join another."""
    if dist.is_initialized():
        dist.destroy_process_group()
    # Groups are named by their number. A group that could not be made has taken its number all the same, and torch has
    # no public name to reset it: this process would wait for group "1" in a world where the others meet in "0".
    torch.distributed.distributed_c10d._world.group_count = 0
    _forget_meshes()
    _forget_symmetric_memory()
    gc.collect()  # a model's cycles of references hold groups too


def _forget_symmetric_memory() -> None:
    """Drop the memory that async tensor parallelism shares in each group.

    torch knows it by the group's name, which a group of the next world has too, and has no public name to drop it.
    """
    if (module := sys.modules.get("torch.distributed._symmetric_memory")) is not None:
        getattr(module, "_group_name_to_workspace_tensor", {}).clear()


def _forget_meshes() -> None:
    """Empty torch's caches, which know meshes by their shape, and keep their groups.

    In another world DTensor would use the dead groups, and until then their threads spin, as their peers are gone.
    torch has no public names for this.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return  # no DTensor was made
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    for module in [module for name, module in list(sys.modules.items()) if name.startswith("torch.distributed.")]:
        for function in _caches_in(module):
            function.cache_clear()


@functools.cache
def _caches_in(module: ModuleType) -> list[Any]:
    """Return the functions of a module of `torch.distributed` that remember results (`functools.lru_cache`).

    They are in the module and its classes, and stay: a search of all modules takes 40 ms. The garbage collector knows
    them too, but takes longer, and does not list those that a forked worker has from its fork server (`gc.freeze`).
    """
    found: list[Any] = []
    for value in list(vars(module).values()):
        is_class = issubclass(type(value), type) and value.__module__ == module.__name__
        members = list(vars(value).values()) if is_class else [value]
        found += [function for function in map(_unbound, members) if _is_cache(function)]
    return found


def _unbound(member: Any) -> Any:
    """The function of a static or class method; anything else as it is."""
    return member.__func__ if type(member) in (staticmethod, classmethod) else member


def _is_cache(function: Any) -> bool:
    is_cache = type(function) is type(functools.cache(_is_cache))
    return is_cache and function.__module__.startswith("torch.distributed.")


def keep_freed_memory() -> None:
    """Let the process keep the memory that it frees, where the C library is glibc.

    By default each large tensor is mapped anew, and the kernel clears its pages again in every step: tens of
    thousands of faults, about a tenth of the time of a step of 6 layers, 384 wide, on two threads.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def give_back_freed_memory() -> None:
    """Return what the process has freed and kept to the system, where the C library is glibc."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def processes_here(size: int) -> int:
    """Return how many of a world's processes are on this machine: what the launcher says, or all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", size))


def node_of_each_rank(world: World) -> list[int]:
    """Return a number for the machine of each rank: equal for ranks of one machine. All ranks call it together.

    A machine is known by its name among the nodes of the run, or in a run that another launcher started by its host's
    and that launcher's number for it.
    """
    host = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"
    name = os.environ.get("ARGOSY_NODE") or host
    nodes = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    nodes[world.rank] = zlib.crc32(name.encode())
    numbers: list[int] = world.sum(nodes).tolist()
    return numbers


def threads_per_process(launch: LaunchConfig, local_processes: int) -> int:
    """Return the CPU threads for each process of this machine: what the user says, or an equal share of the cores."""
    return launch.threads or max(1, cores_here() // local_processes)


def hold_store() -> None:
    """Hold torch's rendezvous store on a free port of `STORE_HOST`: send the client the port, and end when it closes
    the channel. Entry of a forked process."""
    client, host = channel_to_parent(), os.environ[STORE_HOST]
    with listener_of((host, 0), BACKLOG) as listener:
        port, descriptor = listener.getsockname()[1], os.dup(listener.fileno())  # which the store closes
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    with suppress(ChannelClosed):
        client.send("store", port=store.port)
        client.receive()


def _device(launch: LaunchConfig) -> torch.device:
    kind = type_here() if launch.device == "auto" else launch.device
    if kind == "cpu":
        return CPU
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    use(device)
    return device
