"""The processes of a run: which of them this is, and on which device."""

from __future__ import annotations

import ctypes
import datetime
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.config.schema import LaunchConfig
from argosy.faults import fault

T = TypeVar("T")
CPU = torch.device("cpu")
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h


@dataclass(frozen=True)
class World:
    """This process among all of a run. A world of one needs no process group, and its collectives do nothing."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU

    @property
    def is_first(self) -> bool:
        """True for rank 0, which speaks for the run: it prints, writes metrics and commits checkpoints."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, mine: T) -> list[T]:
        """Return what each process gives, by rank; any object that can be pickled."""
        everyone = [mine] * self.size
        if self.size > 1:
            dist.all_gather_object(everyone, mine)
        return everyone

    def share_first(self, look: Callable[[], T]) -> T:
        """Return to all processes what `look` returns on rank 0, which alone calls it: any object that can be pickled.

        Raises: what `look` does, on all processes.
        """
        found: list[Any] = [None, None]
        if self.is_first:
            try:
                found = [look(), None]
            except Exception as error:
                found = [None, error]
        if self.size > 1:
            dist.broadcast_object_list(found, device=self.device)
        result, problem = found
        if problem is not None:
            raise problem
        first: T = result
        return first

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()


@dataclass(frozen=True)
class Place:
    """A process's place in a world to join, whose rendezvous store is open already."""

    rank: int
    size: int
    local_rank: int
    """Its number among the processes of its node."""
    local_size: int
    host: str
    """The host of the store."""
    port: int

    def environment(self) -> dict[str, str]:
        """Return the environment that `join_world` reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's way to say that the store is there already
        }


def join_world(launch: LaunchConfig) -> World:
    """Join the processes that the environment names (RANK, WORLD_SIZE, MASTER_ADDR, ...; torchrun's and ours)."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    fault("join", rank=rank)
    device = _device(launch)
    if device.type == "cpu":
        keep_freed_memory()
    torch.set_num_threads(threads_per_process(launch, processes_here(size)))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=launch.timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    return World(rank, size, device)


def leave_world() -> None:
    """Close the process groups of this world, so that the process may join another."""
    if dist.is_initialized():
        dist.destroy_process_group()
    # Groups are named by their number. A group that could not be made has taken its number all the same, and torch has
    # no public name to reset it: this process would wait for group "1" in a world where the others meet in "0".
    torch.distributed.distributed_c10d._world.group_count = 0
    _forget_meshes()
    gc.collect()  # a model's cycles of references hold groups too


def _forget_meshes() -> None:
    """Empty torch's caches, which know meshes by their shape, and keep their groups.

    In another world DTensor would use the dead groups, and until then their threads spin, as their peers are gone.
    torch has no public names for this.
    """
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    for function in _torch_s_caches():
        function.cache_clear()


def _torch_s_caches() -> Iterator[Any]:
    """Yield each function of `torch.distributed` that remembers results (`functools.lru_cache`).

    They are in its modules and classes. The garbage collector knows them too, but a search of all its objects takes 50
    ms, and it does not list those that a forked worker has from its fork server (`gc.freeze`).
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed."):
            for value in list(vars(module).values()):
                is_class = issubclass(type(value), type) and value.__module__ == name
                members = list(vars(value).values()) if is_class else [value]
                yield from (function for function in map(_unbound, members) if _is_cache(function))


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


def threads_per_process(launch: LaunchConfig, local_processes: int) -> int:
    """Return the CPU threads for each process of this machine: what the user says, or an equal share of the cores."""
    return launch.threads or max(1, len(os.sched_getaffinity(0)) // local_processes)


def _device(launch: LaunchConfig) -> torch.device:
    if launch.device == "cpu" or (launch.device == "auto" and not torch.cuda.is_available()):
        return CPU
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
