"""State goes from any layout to any other, to the bit, and what was damaged on the way is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from argosy.checkpoint import exchange as module
from argosy.checkpoint.boxes import Box
from argosy.checkpoint.exchange import CorruptMessage, NobodyHas, Traffic, exchange
from argosy.parallel.world import World
from checkpoint.parts import part, value


def test_what_no_rank_has_is_named():
    half = part("vector", (8,), [(0, 4)])
    with pytest.raises(NobodyHas, match="no rank has all of it: vector lacks 2 of its 2 numbers there"):
        exchange({half: value(half)}, {part("vector", (8,), [(4, 6)]): torch.zeros(2)}, None)


def test_alone_a_rank_takes_what_it_has():
    held, wanted = part("vector", (8,), [(0, 8)]), part("vector", (8,), [(2, 6)])
    tensor = torch.zeros(4)
    assert exchange({held: value(held)}, {wanted: tensor}, None) == Traffic(0, 0, 16)
    assert torch.equal(tensor, value(wanted))


def columns(rank: int, ranks: int, dtype: str) -> list[Box]:
    """A rank's columns of a matrix, and all of a scalar."""
    width = -(-30 // ranks)
    cut = part("matrix", (12, 30), [(0, 12), (min(rank * width, 30), min(30, rank * width + width))], dtype)
    return [cut, part("scalar", (), [], "int64")]


def rows_on_first(rank: int, dtype: str) -> list[Box]:
    """The rows of a matrix, on ranks 0 and 1 alone; the scalar on rank 1."""
    if rank > 1:
        return []
    boxes = [part("matrix", (12, 30), [(rank * 6, rank * 6 + 6), (0, 30)], dtype)]
    return boxes + ([part("scalar", (), [], "int64")] if rank else [])


def from_rows_to_columns(world: World, message_bytes: int, dtype: str, wanted_dtype: str) -> Traffic:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MESSAGE_BYTES", message_bytes)
        held = {box: value(box) for box in rows_on_first(world.rank, dtype)}
        wanted = {b: torch.zeros(b.shape, dtype=getattr(torch, b.dtype)) for b in columns(world.rank, 4, wanted_dtype)}
        traffic = exchange(held, wanted, dist.group.WORLD)
        for box, tensor in wanted.items():
            assert torch.equal(tensor, value(box)), f"{box} on rank {world.rank}"
        return traffic


@pytest.mark.parametrize(
    ("message_bytes", "dtype", "wanted_dtype"),
    [
        (2**20, "float32", "float32"),
        (24, "float32", "float32"),  # a message holds less than a row
        (2**20, "bfloat16", "float32"),  # a plan of another precision
        (256, "bool", "bool"),
    ],
)
def test_ranks_send_each_other_what_they_lack(workers, message_bytes, dtype, wanted_dtype):
    traffic = workers.run(4, from_rows_to_columns, message_bytes, dtype, wanted_dtype)
    assert sum(t.sent_bytes for t in traffic) == sum(t.received_bytes for t in traffic)
    assert traffic[2].sent_bytes == traffic[3].sent_bytes == 0
    size = 12 * 30 * getattr(torch, dtype).itemsize + 4 * 8
    assert sum(t.received_bytes + t.own_bytes for t in traffic) == size


def flip_a_bit(world: World, sender: int, receiver: int) -> Any:
    """An exchange in which one bit changes on the way from one rank to another; what each rank is told."""
    real = dist.batch_isend_irecv

    def damaging(operations: list[dist.P2POp]) -> Any:
        for operation in operations:
            if operation.op is dist.isend and (world.rank, operation.group_peer) == (sender, receiver):
                operation.tensor[17] ^= 4
        return real(operations)

    held = {box: value(box) for box in rows_on_first(world.rank, "float32")}
    wanted = {box: torch.zeros(box.shape, dtype=getattr(torch, box.dtype)) for box in columns(world.rank, 4, "float32")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", damaging)
        try:
            exchange(held, wanted, dist.group.WORLD)
        except CorruptMessage as error:
            answer = str(error)
    exchange(held, wanted, dist.group.WORLD)  # no rank is left waiting, and it may be done again
    for box, tensor in wanted.items():
        assert torch.equal(tensor, value(box))
    return answer


def test_a_message_that_was_damaged_is_refused_on_all_ranks_and_its_ends_are_named(workers):
    answers = workers.run(4, flip_a_bit, 1, 3)
    assert len(set(answers)) == 1
    assert "what rank 1 sent to rank 3 (matrix, scalar) does not match its checksum" in answers[0]
