"""One pool of gloo processes for all distributed tests: starting torch costs seconds, so it is done once."""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from argosy.parallel.world import World

POOL_SIZE = 4
TIMEOUT_S = 120


class WorkerPool:
    """Processes that run a function together, as the ranks of a world of any size up to the pool's."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(POOL_SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()  # so that the death of the process ends the pipe
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(world, *arguments)` on ranks 0..size-1 at once; their results by rank."""
        store = tempfile.mktemp(prefix="argosy-store-")  # gloo makes the file itself
        for rank in range(size):
            # Pickled twice, so that what cannot be imported over there is reported and not the worker's end.
            self._pipes[rank].send((pickle.dumps((function, arguments)), rank, size, store))
        answers = []
        for rank in range(size):
            assert self._pipes[rank].poll(TIMEOUT_S), f"rank {rank} did not answer in {TIMEOUT_S} s"
            answers.append(self._pipes[rank].recv())
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        assert not failures, "\n".join(failures)
        return [result for _, result in answers]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()  # they have nothing to tidy up, and torch takes a second to leave by itself
            process.join()


def _serve(pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    while True:
        work, rank, size, store = pipe.recv()
        try:
            function, arguments = pickle.loads(work)
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
            try:
                pipe.send((True, function(World(rank, size), *arguments)))
            finally:
                dist.destroy_process_group()
        except BaseException:
            pipe.send((False, traceback.format_exc()))
