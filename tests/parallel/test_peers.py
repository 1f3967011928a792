"""How ranks agree and send each other letters."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.parallel import peers as module
from argosy.parallel.encoding import WrongMessage
from argosy.parallel.peers import PeerExchange, PeerMessage, Peers, Talk, over, peers_of, together
from argosy.parallel.world import World

SIZES = st.integers(1, 20)


def all_of(size: int) -> list[Peers]:
    return [Peers(rank, size) for rank in range(size)]


@settings(deadline=None)
@given(SIZES)
def test_what_is_merged_has_each_rank_s_part_once(size):
    assert together([p.merge(2**p.rank, int, lambda a, b: a + b) for p in all_of(size)]) == [2**size - 1] * size


@settings(deadline=None)
@given(st.lists(st.sets(st.integers(0, 30)), min_size=1, max_size=20))
def test_a_union_has_what_any_rank_gives_once_and_in_one_order(given):
    found = together([p.union(given[p.rank], int) for p in all_of(len(given))])
    assert all(some == found[0] for some in found) and sorted(found[0]) == sorted(set().union(*given))


@settings(deadline=None)
@given(st.data(), SIZES)
def test_every_letter_arrives_once_and_nowhere_else(data, size):
    ranks = st.integers(0, size - 1)
    letters = [
        PeerMessage(*way, text) for *way, text in data.draw(st.lists(st.tuples(ranks, ranks, st.binary(max_size=9))))
    ]
    found = together([p.route([(x.receiver, x.data) for x in letters if x.sender == p.rank]) for p in all_of(size)])
    for rank, mine in enumerate(found):
        key = lambda x: (x.sender, x.data)  # noqa: E731
        assert sorted(mine, key=key) == sorted((x for x in letters if x.receiver == rank), key=key)
        assert [x.sender for x in mine] == sorted(x.sender for x in mine)


@settings(deadline=None)
@given(st.lists(st.sampled_from("xyz"), min_size=1, max_size=20))
def test_ranks_with_one_key_find_each_other(keys):
    for rank, found in enumerate(together([p.alike(keys[p.rank]) for p in all_of(len(keys))])):
        assert found == [other for other, key in enumerate(keys) if key == keys[rank]]


@pytest.mark.parametrize("size", [2, 13, 64, 300])
def test_rounds_grow_with_the_logarithm_of_the_ranks(size):
    def counted(talk: Talk[object]) -> Talk[int]:
        swaps, came = 0, None
        try:
            while True:
                swap = next(talk) if came is None else talk.send(came)
                swaps += 1
                came = yield swap
        except StopIteration:
            return swaps

    rounds = math.ceil(math.log2(size))
    assert max(together([counted(p.route([])) for p in all_of(size)])) <= 2 * rounds
    assert max(together([counted(p.merge(1, int, max)) for p in all_of(size)])) <= rounds + 1


def test_a_talk_in_which_ranks_wait_for_each_other_is_found_in_a_simulation():
    def deaf(rank: int) -> Talk[bytes]:
        return (yield PeerExchange(origin=1 - rank))

    with pytest.raises(AssertionError, match="wait for each other for ever"):
        together([deaf(0), deaf(1)])


def talk_of_all(world: World) -> tuple[int, list[int], list[tuple[int, bytes]]]:
    group = world.host_group
    peers = peers_of(group)
    total = over(group, peers.merge(world.rank, int, lambda a, b: a + b))
    seen = over(group, peers.union([world.rank % 2], int))
    letters = [(rank, b"x" * 1000 * rank) for rank in range(world.size)]
    return total, seen, [(x.sender, x.data) for x in over(group, peers.route(letters))]


@pytest.mark.parametrize("size", [1, 3, 4])
def test_processes_talk_as_the_simulation_does(workers, size):
    for rank, (total, seen, letters) in enumerate(workers.run(size, talk_of_all)):
        assert total == sum(range(size)) and seen == sorted({r % 2 for r in range(size)})
        assert letters == [(sender, b"x" * 1000 * rank) for sender in range(size)]


def hear_something_else(world: World, what: str) -> str:
    """Rank 1 does not speak as a rank does."""
    group = dist.group.WORLD
    if world.rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            wrong = [9, 7] if what == "checksum" else [2**50, 7]
            patch.setattr(module, "head_of", lambda swap: torch.tensor(wrong))
            dist.send(module.head_of(PeerExchange(0, b"something")), 0, group)
            if what == "checksum":
                dist.send(module.tensor_of(b"something"), 0, group)
        return ""
    with pytest.raises(WrongMessage) as caught:
        over(group, iter_of(PeerExchange(origin=1)))
    return str(caught.value)


def iter_of(swap: PeerExchange) -> Talk[bytes]:
    return (yield swap)


@pytest.mark.parametrize(
    ("what", "problem"), [("checksum", "does not match its checksum"), ("length", "1,125,899,906,842,624 bytes")]
)
def test_what_no_rank_sends_is_one_clear_error(workers, what, problem):
    assert problem in workers.run(2, hear_something_else, what)[0]
