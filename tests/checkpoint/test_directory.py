"""Ranks that share a tensor find each other, under any layout, and no rank hears of all others."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.checkpoint.boxes import Box, Misfit
from argosy.checkpoint.directory import Transfer, deal, have_all_two, match
from argosy.checkpoint.shards import box_bytes
from argosy.parallel.peers import Peers, Talk, together
from checkpoint.parts import part, value

WHOLES = {"matrix": (7, 6), "stack": (3, 4, 5), "vector": (5,), "scalar": ()}
Layout = list[list[Box]]
"""By rank, what it holds."""


@st.composite
def layouts(draw: st.DrawFn, ranks: int) -> Layout:
    """Each tensor cut along a grid, each part of it on one rank or more; some ranks may have nothing."""
    layout: Layout = [[] for _ in range(ranks)]
    for name, whole in WHOLES.items():
        edges = []
        for length in whole:
            inner = draw(st.sets(st.integers(1, length - 1), max_size=2)) if length > 1 else set()
            points = [0, *sorted(inner), length]
            edges.append(list(pairwise(points)))
        for cuts in product(*edges):
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                layout[rank].append(part(name, whole, list(cuts)))
    return layout


def matched(held: Layout, wanted: Layout) -> list[list[Transfer] | Misfit]:
    """By rank, what it sends and receives."""
    return together([match(Peers(r, len(held)), *pair) for r, pair in enumerate(zip(held, wanted, strict=True))])


def ways(held: Layout, wanted: Layout) -> list[Transfer]:
    """What ranks receive; what others send is the same."""
    found = [some for some in matched(held, wanted) if not isinstance(some, Misfit)]
    assert len(found) == len(held)
    received = [t for rank, some in enumerate(found) for t in some if t.receiver == rank]
    sent = [t for rank, some in enumerate(found) for t in some if t.sender == rank != t.receiver]
    both_ends = [
        Counter((t.sender, t.receiver, t.source, t.part) for t in some)
        for some in ([t for t in received if t.sender != t.receiver], sent)
    ]
    assert both_ends[0] == both_ends[1]
    return received


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(1, 7))
def test_any_layout_becomes_any_other(data: st.DataObject, ranks: int) -> None:
    held, wanted = data.draw(layouts(ranks)), data.draw(layouts(ranks))
    filled = [{box: torch.full(box.shape, -1.0) for box in boxes} for boxes in wanted]
    for t in ways(held, wanted):
        assert t.source in held[t.sender] and t.wanted in wanted[t.receiver]
        target = filled[t.receiver][t.wanted][t.part.within(t.wanted)]
        assert (target == -1).all(), "a number comes once"
        target.copy_(value(t.source)[t.part.within(t.source)])
    for boxes in filled:
        for box, tensor in boxes.items():
            assert torch.equal(tensor, value(box))


def test_what_a_rank_has_does_not_travel_and_ranks_that_want_the_same_ask_different_ones():
    whole = [part("matrix", (4, 4), [(0, 4), (0, 4)]), part("vector", (8,), [(0, 8)])]
    found = ways([whole, whole, [whole[1]], []], [whole] * 4)
    received = {(t.receiver, t.wanted.name): t.sender for t in found if t.sender != t.receiver}
    assert received.keys() == {(2, "matrix"), (3, "matrix"), (3, "vector")}
    assert {received[2, "matrix"], received[3, "matrix"]} == {0, 1}
    assert sum(t.sender == t.receiver for t in found) == 5


def test_of_what_a_rank_has_a_part_of_only_the_rest_travels():
    whole, upper = part("matrix", (4, 4), [(0, 4), (0, 4)]), part("matrix", (4, 4), [(0, 2), (0, 4)])
    found = ways([[whole], [upper]], [[], [whole]])
    assert [(t.sender, t.part.offset, t.part.shape) for t in found] == [(1, (0, 0), (2, 4)), (0, (2, 0), (2, 4))]


def test_a_part_travels_in_the_dtype_that_it_is_held_in():
    half, single = part("vector", (8,), [(0, 8)], "bfloat16"), part("vector", (8,), [(0, 8)])
    (transfer,) = ways([[half], []], [[], [single]])
    assert (transfer.source, transfer.wanted, transfer.part.dtype) == (half, single, "bfloat16")


def test_all_ranks_hear_of_the_same_that_nobody_has():
    half, end = part("vector", (8,), [(0, 4)]), part("vector", (8,), [(2, 6)])
    found = matched([[half], [], []], [[], [end], []])
    assert {str(some) for some in found} == {"vector lacks 2 of its 4 numbers there"}
    other = part("vector", (9,), [(0, 4)])
    assert {str(some) for some in matched([[other], []], [[], [end]])} == {"vector is [9] there and [8] here"}
    assert {str(some) for some in matched([[], []], [[], [end]])} == {"vector is not there"}


@pytest.mark.parametrize("ranks", [1, 2, 5, 16])
def test_replicas_are_asked_in_turn(ranks):
    """All of a new half take the state from the old half, one from one."""
    boxes = [part(f"tensor {i}", (8,), [(0, 8)]) for i in range(20)]
    found = ways([boxes] * ranks + [[]] * ranks, [boxes] * 2 * ranks)
    load = Counter(t.sender for t in found if t.sender != t.receiver)
    assert load == {rank: len(boxes) for rank in range(ranks)}


@settings(deadline=None)
@given(st.lists(st.sets(st.integers(0, 9)), min_size=1, max_size=8))
def test_each_box_is_dealt_to_one_of_its_holders(held):
    everywhere = [[part(f"tensor {i}", (i,), [(0, i)]) for i in some] for some in held]
    dealt = together([deal(Peers(rank, len(held)), boxes) for rank, boxes in enumerate(everywhere)])
    for mine, boxes in zip(dealt, everywhere, strict=True):
        assert set(mine) <= set(boxes)
    wanted = {box for boxes in everywhere for box in boxes if box.elements}
    assert sorted(box.name for mine in dealt for box in mine) == sorted(box.name for box in wanted)


@settings(deadline=None)
@given(st.integers(1, 8), st.lists(st.integers(1, 1000), min_size=1, max_size=30))
def test_replicas_write_about_equal_shares(ranks, sizes):
    boxes = [part(f"tensor {i}", (size,), [(0, size)]) for i, size in enumerate(sizes)]
    dealt = together([deal(Peers(rank, ranks), boxes) for rank in range(ranks)])
    loads = [sum(map(box_bytes, mine)) for mine in dealt]
    assert max(loads) - min(loads) <= max(map(box_bytes, boxes))


def test_a_box_that_is_at_one_place_only_is_found():
    a, b = part("a", (4,), [(0, 4)]), part("b", (4,), [(0, 4)])

    def two(*held: tuple[str, list[Box]]) -> bool:
        (answer,) = set(together([have_all_two(Peers(r, len(held)), boxes, at) for r, (at, boxes) in enumerate(held)]))
        return answer

    assert two(("x", [a, b]), ("y", [a, b]))
    assert two(("x", [a]), ("x", [b]), ("y", [a]), ("y", [b]))
    assert not two(("x", [a, b]), ("y", [a]))
    assert not two(("x", [a]), ("x", [a]))


def heard_by(held: Layout, wanted: Layout) -> tuple[int, int]:
    """The most bytes that a rank hears, and in how many messages."""
    heard: Counter[int] = Counter()
    times: Counter[int] = Counter()

    def listening(rank: int, talk: Talk[object]) -> Talk[object]:
        came = None
        try:
            while True:
                swap = next(talk) if came is None else talk.send(came)
                came = yield swap
                heard[rank] += len(came)
                times[rank] += swap.origin is not None
        except StopIteration as end:
            return end.value

    talks = [match(Peers(r, len(held)), *pair) for r, pair in enumerate(zip(held, wanted, strict=True))]
    together([listening(rank, talk) for rank, talk in enumerate(talks)])
    return max(heard.values()), max(times.values())


def test_what_a_rank_hears_does_not_grow_with_ranks_that_share_nothing_with_it():
    """Groups of four ranks share their tensors: with 8 times as many, log(n) counts, and n does not."""

    def layout(ranks: int) -> Layout:
        return [
            [part(f"tensor {r // 4}.{i}", (8,), [(r % 4 * 2, r % 4 * 2 + 2)]) for i in range(40)] for r in range(ranks)
        ]

    def swapped(held: Layout) -> Layout:
        return [boxes for r in range(0, len(held), 4) for boxes in reversed(held[r : r + 4])]

    few, many = (heard_by(layout(n), swapped(layout(n))) for n in (32, 256))
    assert many[0] < 4 * few[0] and many[1] < 2 * few[1]
