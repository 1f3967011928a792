"""How far each group has got can be read while the process waits in one of them."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist

from argosy.observe.sequences import sequence_numbers
from argosy.parallel.world import World
from workers import WorkerPool


def _counts(world: World) -> list[dict[str, int]]:
    """Before, and while rank 0 waits for rank 1 in one more all-reduce of a second group."""
    pair = dist.new_group([0, 1], group_desc="pair")
    dist.all_reduce(torch.ones(2))
    before = sequence_numbers()
    seen: list[dict[str, int]] = []

    if world.rank == 0:
        thread = threading.Thread(target=lambda: (time.sleep(0.3), seen.append(sequence_numbers())))
        thread.start()
        dist.all_reduce(torch.ones(2), group=pair)
        thread.join()
    else:
        seen.append(sequence_numbers())
        time.sleep(0.6)
        dist.all_reduce(torch.ones(2), group=pair)
    return [before, *seen]


def test_a_rank_that_others_wait_for_has_begun_fewer_collectives(workers: WorkerPool) -> None:
    (before, waiting), (_, late) = workers.run(2, _counts)
    names = sorted(before)
    assert len(names) == 2 and names[0].startswith("default_pg#") and names[1].startswith("pair#")
    world, pair = names
    assert waiting[world] == late[world] >= 1
    assert waiting[pair] == late[pair] + 1
