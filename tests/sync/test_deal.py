"""What is dealt to whom: each item once, and no gradient staler than the bound, in whatever order they come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.sync.deal import AppliedUpdate, DealtItems, rate_of


def test_one_worker_gets_the_items_in_order_and_is_never_stale():
    dealing = DealtItems(steps=3, bound=0)
    for number in range(3):
        lease = dealing.deal("A")
        assert lease is not None
        update = dealing.commit("A", lease.name)
        assert update == AppliedUpdate(number, number, "A", number)
        assert update.staleness == 0
    assert dealing.is_over
    assert dealing.deal("A") is None


def test_with_a_bound_of_zero_workers_take_turns():
    dealing = DealtItems(steps=3, bound=0)
    lease = dealing.deal("A")
    assert lease is not None
    assert dealing.deal("B") is None
    assert dealing.holds_up == ["A"]
    dealing.commit("A", lease.name)
    assert dealing.deal("B") is not None


def test_what_a_lost_worker_had_is_dealt_to_the_next():
    dealing = DealtItems(steps=4, bound=4)
    first, second = dealing.deal("A"), dealing.deal("B")
    assert first is not None
    assert second is not None
    assert (first.item, second.item) == (0, 1)
    dealing.give_back("A")
    again = dealing.deal("B")
    assert again is not None
    assert again.item == 0
    assert dealing.commit("A", first.name) is None
    assert dealing.commit("B", second.name) is None
    assert dealing.commit("B", again.name) == AppliedUpdate(0, 0, "B", 0)


def test_a_commit_that_is_said_twice_counts_once():
    dealing = DealtItems(steps=4, bound=4)
    lease = dealing.deal("A")
    assert lease is not None
    assert dealing.commit("A", lease.name) == dealing.commit("A", lease.name)
    assert dealing.version == 1


def test_another_item_stands_in_for_one_that_is_skipped():
    dealing = DealtItems(steps=2, bound=4)
    lease = dealing.deal("A")
    assert lease is not None
    assert dealing.skip("A", lease.name) == 0
    for item in (1, 2):
        lease = dealing.deal("A")
        assert lease is not None
        assert lease.item == item
        dealing.commit("A", lease.name)
    assert dealing.is_over
    assert sorted(dealing.done) == [1, 2]


def test_it_goes_on_after_the_updates_of_a_ledger():
    updates = [AppliedUpdate(0, 1, "B", 0), AppliedUpdate(1, 0, "A", 0)]
    dealing = DealtItems.after(updates, [2], steps=5, bound=3, generation="x")
    lease = dealing.deal("A")
    assert lease is not None
    assert (lease.item, lease.version) == (3, 2)


@given(st.integers(0, 6), st.integers(1, 5), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=300))
def test_the_bound_holds_and_each_item_is_done_once_whatever_happens(bound, workers, happenings):
    dealing, steps = DealtItems(steps=40, bound=bound), 40
    for number, what in happenings:
        site = f"W{number % workers}"
        lease = dealing.out.get(site)
        if lease is None:
            dealing.deal(site)
        elif what == 0:
            dealing.give_back(site)
        elif what == 1:
            dealing.skip(site, lease.name)
        else:
            update = dealing.commit(site, lease.name)
            assert update is not None
            assert 0 <= update.staleness <= bound
    assert sorted(update.update for update in dealing.done.values()) == list(range(dealing.version))
    assert not dealing.skipped & set(dealing.done)
    for _ in range(3 * steps):  # whoever is left finishes
        for site in [f"W{number}" for number in range(workers)]:
            if (lease := dealing.out.get(site)) is not None:
                dealing.commit(site, lease.name)
            else:
                dealing.deal(site)
    assert dealing.is_over
    assert dealing.version == steps


@pytest.mark.parametrize(("staleness", "how", "rate"), [(0, "inverse", 1), (1, "inverse", 1), (4, "inverse", 0.25),
                                                        (4, "constant", 1)])  # fmt: skip
def test_the_rate_falls_with_staleness(staleness, how, rate):
    assert rate_of(staleness, how) == rate
