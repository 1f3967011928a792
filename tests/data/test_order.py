from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.data.order import (
    CIRCLE,
    GOLDEN_STEP,
    Mixture,
    MixtureStage,
    SampleOrder,
    Samples,
    floor_sum,
    kept,
    key_of,
    permute,
    skipped_by,
)


def listed(samples: Samples) -> list[tuple[int, int, int]]:
    return list(zip(samples.sources.tolist(), samples.epochs.tolist(), samples.windows.tolist(), strict=True))


@st.composite
def orders(draw: st.DrawFn) -> SampleOrder:
    windows = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    weights = st.tuples(*[st.floats(0.01, 10) for _ in windows])
    starts = [0, *sorted(draw(st.sets(st.integers(1, 300), max_size=2)))]
    return SampleOrder(draw(st.integers(0, 2**80)), windows, [MixtureStage(start, draw(weights)) for start in starts])


@given(orders(), st.lists(st.integers(0, 400), max_size=8))
def test_samples_do_not_depend_on_where_they_are_asked_from(order: SampleOrder, cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), 400]
    in_pieces = [sample for start, stop in pairwise(ends) for sample in listed(order.samples(start, stop))]
    assert in_pieces == listed(order.samples(0, 400))


@settings(max_examples=25)
@given(st.data())
def test_restarts_at_other_world_sizes_see_every_sample_once(data: st.DataObject) -> None:
    """Steps are done by changing numbers of ranks, each a slice of the global batch; the run is the same."""
    order = SampleOrder(3, [17, 5], [MixtureStage(0, (2.0, 1.0)), MixtureStage(48, (1.0, 3.0))])
    seen: list[tuple[int, int, int]] = []
    for step in range(15):
        ranks = data.draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
        rows = 12 // ranks
        for rank in range(ranks):
            seen += listed(order.samples(step * 12 + rank * rows, step * 12 + (rank + 1) * rows))
    assert seen == listed(order.samples(0, 180))


@given(orders())
def test_every_epoch_visits_every_window_once(order: SampleOrder) -> None:
    samples = listed(order.samples(0, 1000))
    for source, windows in enumerate(order.windows):
        visits = [(epoch, window) for s, epoch, window in samples if s == source]
        assert len(set(visits)) == len(visits)
        for epoch in range(len(visits) // windows):
            assert sorted(w for e, w in visits if e == epoch) == list(range(windows))


@given(orders(), st.integers(0, 700))
def test_counts_are_the_samples_before(order: SampleOrder, n: int) -> None:
    counted = Counter(order.samples(0, n).sources.tolist())
    assert order.counts(n) == [counted[source] for source in range(len(order.windows))]


def test_epochs_sources_and_seeds_have_orders_of_their_own() -> None:
    def windows(seed: int, source: int, epoch: int) -> tuple[int, ...]:
        order = SampleOrder(seed, [50, 50], [MixtureStage(0, (1 - source, source))])
        return tuple(order.samples(50 * epoch, 50 * epoch + 50).windows.tolist())

    assert len({windows(seed, source, epoch) for seed in (0, 1) for source in (0, 1) for epoch in (0, 1)}) == 8


def test_a_later_stage_or_source_does_not_change_what_came_before() -> None:
    short = SampleOrder(5, [30, 20], [MixtureStage(0, (1.0, 2.0))])
    longer = SampleOrder(5, [30, 20, 10], [MixtureStage(0, (1.0, 2.0, 0.0)), MixtureStage(64, (0.0, 1.0, 1.0))])
    assert listed(short.samples(0, 64)) == listed(longer.samples(0, 64))
    assert set(longer.samples(64, 200).sources.tolist()) == {1, 2}
    assert listed(longer.as_of(63).samples(64, 200)) == listed(short.samples(64, 200)), "as if the stage had no end"


def test_far_into_a_huge_run_nothing_overflows() -> None:
    order = SampleOrder(1, [2**40, 3], [MixtureStage(0, (1.0, 1.0)), MixtureStage(2**45, (3.0, 1.0))])
    samples = order.samples(2**50, 2**50 + 1000)
    assert samples.windows.min() >= 0 and samples.windows[samples.sources == 0].max() < 2**40
    assert abs(np.mean(samples.sources == 0) - 0.75) < 0.02
    small = samples.epochs[samples.sources == 1]
    assert small.min() > 2**46 and (np.diff(small) >= 0).all()


def test_an_empty_range_is_empty() -> None:
    assert len(SampleOrder(0, [4], [MixtureStage(0, (1.0,))]).samples(7, 7)) == 0


@st.composite
def ranges(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Ranges below 80 that do not overlap, in any order."""
    ends = sorted(draw(st.lists(st.integers(0, 80), unique=True, max_size=10)))
    return draw(st.permutations(list(zip(ends[::2], ends[1::2], strict=False))))


@given(ranges(), st.integers(0, 40), st.integers(1, 30))
def test_kept_samples_are_those_that_are_left_when_the_skipped_ones_are_taken_out(
    skipped: list[tuple[int, int]], start: int, length: int
) -> None:
    left = [i for i in range(200) if not any(first <= i < stop for first, stop in skipped)]
    found = kept(start, start + length, skipped)
    assert [i for first, stop in found for i in range(first, stop)] == left[start : start + length]


@given(ranges(), st.integers(1, 9))
def test_each_skipped_range_belongs_to_the_one_step_that_goes_past_it(
    skipped: list[tuple[int, int]], batch: int
) -> None:
    by_step = [skipped_by(step * batch, (step + 1) * batch, skipped) for step in range(200 // batch)]
    assert [hole for holes in by_step for hole in holes] == sorted(skipped)


def permuted(n: int, key: int) -> list[int]:
    return permute(np.arange(n, dtype=np.uint64), n, np.full(n, key, np.uint64)).tolist()


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_is_a_bijection(n: int, key: int) -> None:
    assert sorted(permuted(n, key)) == list(range(n))


@given(st.integers(1, 2**63), st.data())
def test_stays_in_range_and_apart_at_any_size(n: int, data: st.DataObject) -> None:
    index = sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=50)))
    where = permute(np.array(index, np.uint64), n, np.full(len(index), 7, np.uint64)).tolist()
    assert len(set(where)) == len(index) and all(0 <= place < n for place in where)


def test_elements_are_permuted_by_their_own_key() -> None:
    keys = np.array([1, 2, 1, 3], np.uint64)
    together = permute(np.array([5, 5, 6, 5], np.uint64), 1000, keys)
    alone = [
        permute(np.array([i], np.uint64), 1000, np.array([k], np.uint64))[0]
        for i, k in zip([5, 5, 6, 5], keys, strict=True)
    ]
    assert together.tolist() == alone and together[0] != together[1]


def test_looks_random() -> None:
    """Displacements of neighbours, fixed points and rank correlation are those of a random permutation."""
    n = 20_000
    where = np.array(permuted(n, key_of(1)), np.float64)
    assert abs(np.corrcoef(np.arange(n), where)[0, 1]) < 4 / n**0.5
    assert abs(np.corrcoef(where[:-1], where[1:])[0, 1]) < 4 / n**0.5
    assert np.sum(where == np.arange(n)) < 10


def test_every_place_is_as_likely_for_small_domains() -> None:
    n, keys = 5, 20_000
    where = permute(np.full(keys, 2, np.uint64), n, np.arange(keys, dtype=np.uint64))
    counts = np.bincount(where.astype(np.int64), minlength=n)
    assert np.abs(counts - keys / n).max() < 5 * (keys / n) ** 0.5


def test_keys_depend_on_every_part() -> None:
    keys = {key_of(0, "a"), key_of(0, "b"), key_of(1, "a"), key_of(2**200, "a"), key_of(0, "a", 0)}
    assert len(keys) == 5


WEIGHTS = st.lists(st.floats(0, 1e6), min_size=1, max_size=6).filter(any)


@given(st.integers(0, 60), st.integers(1, 50), st.integers(-200, 200), st.integers(-200, 200))
def test_floor_sum_is_the_sum(n: int, m: int, a: int, b: int) -> None:
    assert floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))


@given(WEIGHTS, st.integers(0, CIRCLE - 1), st.integers(0, 2000))
def test_counts_in_closed_form_are_counted_one_by_one(weights: list[float], shift: int, n: int) -> None:
    mixture = Mixture(weights, shift)
    assert mixture.counts(n) == np.bincount(mixture.sources(0, n), minlength=len(weights)).tolist()


@given(WEIGHTS, st.integers(0, CIRCLE - 1), st.integers(0, 2**70))
def test_counts_agree_far_into_the_run(weights: list[float], shift: int, start: int) -> None:
    mixture = Mixture(weights, shift)
    drawn = np.bincount(mixture.sources(start, start + 50), minlength=len(weights))
    before, after = mixture.counts(start), mixture.counts(start + 50)
    assert [b - a for a, b in zip(before, after, strict=True)] == drawn.tolist()


@given(WEIGHTS, st.integers(0, CIRCLE - 1), st.integers(2, 10**12))
def test_proportions_are_within_log_n(weights: list[float], shift: int, n: int) -> None:
    total = sum(weights)
    for weight, count in zip(weights, Mixture(weights, shift).counts(n), strict=True):
        assert abs(count - n * weight / total) <= 3 + 2 * math.log(n)


def test_proportions_are_exact_over_the_whole_circle() -> None:
    assert Mixture([1, 1, 2], 12345).counts(CIRCLE) == [CIRCLE // 4, CIRCLE // 4, CIRCLE // 2]


def test_source_of_weight_zero_is_never_drawn() -> None:
    assert set(Mixture([0, 1, 0, 1, 0], CIRCLE - 1).sources(0, 1000).tolist()) == {1, 3}


def test_the_step_spreads_evenly_at_every_scale() -> None:
    """The claim about STEP in its docstring: continued fraction with partial quotients of at most 5."""
    quotients, a, m = [], GOLDEN_STEP, CIRCLE
    while a:
        quotients.append(m // a)
        a, m = m % a, a
    assert GOLDEN_STEP % 2 == 1 and max(quotients) <= 5
