"""One pool of gloo processes for all distributed tests: starting torch costs seconds, so it is done once."""

from __future__ import annotations

import gc
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from argosy.engines import local
from argosy.launch import children
from argosy.observe import clock
from argosy.parallel.world import World, leave_world
from argosy.processes import fork_server
from argosy.supervise import coordinator_client
from warm import WarmChild, fork_writers, spawn

POOL_SIZE = 8
STARTED_AT_ONCE = 4
FOR_SOME_PLANS = [f"torch.distributed.{name}" for name in ("tensor", "fsdp", "pipelining")]
"""What argosy imports for some plans only: a second that each process would take."""
TIMEOUT_S = 120
AFTER_FAILURE_S = 5
"""What is left to the other ranks once one has failed: they may wait for it in a collective."""


class WorkerPool:
    """Processes that run a function together, as the ranks of a world of any size up to `POOL_SIZE`."""

    def __init__(self) -> None:
        # Each process is forked from one that has imported what the tests need, and computes nothing itself.
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["tiny", "workers", *FOR_SOME_PLANS, "pytest"])
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._stores = tempfile.TemporaryDirectory(prefix="argosy-pool-")
        self._worlds = count()
        self._grow(STARTED_AT_ONCE)

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(world, *arguments)` on ranks 0..size-1 at once; their results by rank."""
        assert size <= POOL_SIZE, f"a world of {size}, and the pool has {POOL_SIZE} processes at most"
        self._grow(size)
        store = f"{self._stores.name}/{next(self._worlds)}"  # gloo makes the file itself
        for rank in range(size):
            # Pickled twice, so that what cannot be imported over there is reported and not the worker's end.
            self._pipes[rank].send((pickle.dumps((function, arguments)), rank, size, store))
        answers = self._answers(size)
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        assert not failures, "\n".join(failures)
        return [result for _, result in answers]

    def close(self) -> None:
        """End the processes; another `run` starts new ones."""
        for process in self._processes:
            process.kill()  # they have nothing to tidy up, and torch takes a second to leave by itself
            process.join()
        self._pipes, self._processes = [], []

    def _answers(self, size: int) -> list[tuple[bool, Any]]:
        """Return for each rank True and its result, or False and its error. A failure leaves the others little time."""
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes[:size])}
        began, end = time.monotonic(), time.monotonic() + TIMEOUT_S
        while waiting and time.monotonic() < end:
            for pipe in wait(list(waiting), timeout=end - time.monotonic()):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                answers[rank] = _received(pipe)
                if not answers[rank][0]:
                    end = min(end, time.monotonic() + AFTER_FAILURE_S)
        if waiting:
            self.close()  # or an answer that is late would be taken for that to the next question
        missing = (False, f"no answer in {time.monotonic() - began:.0f} s")
        return [answers.get(rank, missing) for rank in range(size)]

    def _grow(self, size: int) -> None:
        """Start as many more processes as a world of `size` lacks: each takes 300 MB, and few tests need many."""
        for _ in range(len(self._processes), size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()  # so that the death of the process ends the pipe
            self._pipes.append(ours)
            self._processes.append(process)


def make_the_tests_process_light() -> None:
    """Settings of each process that trains tiny models: one thread, a short look at how fast its matmuls are, children
    that are forked.
    """
    torch.set_num_threads(1)  # tensors this small are done before a second thread is awake
    clock.SIZE["cpu"] = 128  # a quarter of a second of matmuls is what all else in such a run takes
    for module in (local, fork_server, coordinator_client):
        module.Child = WarmChild  # type: ignore[attr-defined]
    children.spawn = spawn  # type: ignore[attr-defined, assignment]


def next_world(world: World, store: Path, size: int | None = None) -> World:
    """Leave `world` for another, of `size`, whose members meet at the file `store`: its rank is what it was."""
    leave_world()
    return _join(store, world.rank, size or world.size)


def _join(store: Path | str, rank: int, size: int) -> World:
    """The world of the processes that meet at the file `store`, once all of them are in it.

    One that left it sooner would break off the connections which others are about to make.
    """
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    world = World(rank, size)
    world.barrier()
    return world


def _received(pipe: Connection) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = pipe.recv()
    except EOFError:
        return False, "the process died"
    return answer


def _serve(pipe: Connection) -> None:
    make_the_tests_process_light()
    fork_writers(from_here=True)
    modules = 0
    while True:
        work, rank, size, store = pipe.recv()
        try:
            function, arguments = pickle.loads(work)
            if len(sys.modules) > modules:
                modules = len(sys.modules)
                gc.freeze()  # `leave_world` collects garbage after each test: not among all that torch has made
            try:
                pipe.send((True, function(_join(store, rank, size), *arguments)))
            finally:
                leave_world()
        except BaseException:
            pipe.send((False, traceback.format_exc()))
