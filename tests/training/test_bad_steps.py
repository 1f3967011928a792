"""Bad steps are told from good ones, and what becomes of them follows the policy; healthy curves are left alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from argosy.config.schema import ResilienceConfig
from argosy.training.bad_steps import MOST_IN_A_ROW, MOST_REWINDS, BadStepPolicy, Counts, Reason, Ruling, Verdict

NOT_FINITE = [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf), (-math.inf, math.nan)]
COMMIT, RETRY, SKIP, REWIND, STOP = Verdict.COMMIT, Verdict.RETRY, Verdict.SKIP, Verdict.REWIND, Verdict.STOP


def judge(stage_of: Callable[[int], int] = lambda step: 0, **settings: object) -> BadStepPolicy:
    return BadStepPolicy(ResilienceConfig.model_validate(settings), stage_of)


def healthy(steps: int = 100, seed: int = 0, loss: float = 3.0) -> list[tuple[int, float, float]]:
    """Steps of a run whose loss and norm vary a little."""
    draw = np.random.default_rng(seed)
    return [(s, loss + 0.05 * draw.normal(), 0.5 * math.exp(0.1 * draw.normal())) for s in range(steps)]


def settled(**settings: object) -> BadStepPolicy:
    settled = judge(**settings)
    settled.remember(healthy())
    return settled


def twice(judging: BadStepPolicy, step: int, loss: float, norm: float) -> Ruling:
    """What becomes of a step that looks bad, and looks the same when it is done again."""
    assert judging.rule(step, loss, norm).verdict is RETRY
    return judging.rule(step, loss, norm)


def test_a_finite_step_is_committed_while_there_is_nothing_to_compare_it_with():
    assert judge().rule(0, loss=5.0, gradient_norm=1e30).verdict is COMMIT


@pytest.mark.parametrize(("loss", "norm"), NOT_FINITE)
def test_a_step_that_is_not_finite_is_skipped(loss, norm):
    ruling = twice(judge(), 0, loss, norm)
    assert (ruling.verdict, ruling.reason) == (SKIP, Reason.NOT_FINITE)


@pytest.mark.parametrize(
    ("loss", "norm", "reason"),
    [
        (3.1, 0.6, None),
        (1.0, 1e-9, None),  # what is far below is good news
        (5.0, 0.6, Reason.LOSS_SPIKE),
        (3.1, 50.0, Reason.NORM_OUTLIER),
        (3.1, 1.0, None),  # a norm twice its median is for clipping
    ],
)
def test_what_is_far_above_the_steps_before_is_bad(loss, norm, reason):
    judging = settled()
    ruling = twice(judging, 100, loss, norm) if reason else judging.rule(100, loss, norm)
    assert ruling.reason is reason
    assert ruling.verdict is (SKIP if reason else COMMIT)


@pytest.mark.parametrize("policy", ["skip", "rewind", "stop"])
@pytest.mark.parametrize(("loss", "norm"), [*NOT_FINITE, (5.0, 0.6), (3.1, 50.0)])
def test_what_is_good_when_it_is_done_again_was_no_bad_step(policy, loss, norm):
    judging, other = settled(on_bad_step=policy), settled(on_bad_step=policy)
    assert judging.rule(100, loss, norm).verdict is RETRY
    ruling = judging.rule(100, 3.1, 0.6)
    assert (ruling.verdict, ruling.reason, ruling.in_a_row) == (COMMIT, None, 0)
    assert ruling.doubt is not None and ruling.doubt.step == 100
    other.rule(100, 3.1, 0.6)
    assert judging.limits(101) == other.limits(101)
    assert judging.rule(101, 3.1, 0.6).doubt is None


def test_each_step_that_looks_bad_is_done_again_once():
    judging = judge()
    for _ in range(2):  # the same step with other samples is another
        assert twice(judging, 3, math.nan, 1.0).verdict is SKIP


def test_counts_go_on_in_a_new_world_from_who_has_the_newest():
    before, new = Counts(), Counts()
    twice(BadStepPolicy(ResilienceConfig(), counts=before), 7, math.nan, 1.0)
    judging = BadStepPolicy(ResilienceConfig(), counts=new)
    judging.go_on_from([Counts(), new, before])
    assert new == before and new.rewinds is not before.rewinds
    rulings = [twice(judging, 7, math.nan, 1.0) for _ in range(MOST_IN_A_ROW - 1)]
    assert [ruling.in_a_row for ruling in rulings] == [2, 3, 4, 5] and rulings[-1].verdict is STOP


def test_a_step_that_looked_bad_in_the_last_world_is_not_done_again_twice():
    before, new = Counts(), Counts()
    assert BadStepPolicy(ResilienceConfig(), counts=before).rule(7, math.nan, 1.0).verdict is RETRY
    judging = BadStepPolicy(ResilienceConfig(), counts=new)
    judging.go_on_from([before, new])
    assert judging.rule(7, math.nan, 1.0).verdict is SKIP


def test_rewinds_are_counted_on_where_the_state_is_an_older_one():
    counts = Counts()
    judging = BadStepPolicy(ResilienceConfig(), counts=counts)
    assert judging.rewound(6, [])
    twice(judging, 6, math.nan, 1.0)
    judging.went_back([])
    assert (counts.in_a_row, counts.doubt, counts.rewinds[6]) == (0, None, 1)


def test_a_detector_that_is_switched_off_sees_nothing():
    assert settled(loss_spike_sigmas=0).rule(100, 50.0, 0.6).reason is None
    assert settled(norm_outlier_sigmas=0).rule(100, 3.1, 1e9).reason is None


def test_bad_steps_do_not_move_what_the_next_ones_are_compared_with():
    one, other = settled(), settled()
    for _ in range(MOST_IN_A_ROW - 1):
        twice(one, 100, 9.0, 0.6)
    assert one.limits(100) == other.limits(100)


def test_bad_steps_in_a_row_end_the_run():
    judging = judge()
    rulings = [twice(judging, 7, math.nan, 1.0) for _ in range(MOST_IN_A_ROW)]
    assert [ruling.verdict for ruling in rulings] == [SKIP] * (MOST_IN_A_ROW - 1) + [STOP]
    assert [ruling.in_a_row for ruling in rulings] == [1, 2, 3, 4, 5]


def test_a_good_step_between_bad_ones_forgives_them():
    judging = judge()
    for _ in range(3):
        for _ in range(MOST_IN_A_ROW - 1):
            assert twice(judging, 4, math.inf, 1.0).verdict is SKIP
        assert judging.rule(5, 5.0, 1.0).verdict is COMMIT


def test_the_policy_stop_ends_the_run_at_the_first_bad_step():
    assert twice(judge(on_bad_step="stop"), 0, math.nan, 1.0).verdict is STOP


def test_the_policy_rewind_goes_back_after_bad_steps_in_a_row():
    judging = judge(on_bad_step="rewind", rewind_after=2)
    assert [twice(judging, 9, math.nan, 1.0).verdict for _ in range(2)] == [SKIP, REWIND]
    assert judging.rewound(6, healthy(6))
    assert [judging.rule(6, 3.0, 0.5).verdict, twice(judging, 7, math.nan, 1.0).verdict] == [COMMIT, SKIP]


def test_with_nothing_to_go_back_to_bad_steps_are_skipped_until_the_run_ends():
    judging = judge(on_bad_step="rewind", rewind_after=2)
    verdicts = [twice(judging, 9, math.nan, 1.0).verdict for _ in range(MOST_IN_A_ROW)]
    assert verdicts == [SKIP, REWIND, SKIP, SKIP, STOP]


def test_a_run_goes_back_to_the_same_step_only_so_often():
    judging = judge(on_bad_step="rewind")
    assert [judging.rewound(6, []) for _ in range(MOST_REWINDS + 1)] == [True] * MOST_REWINDS + [False]
    assert judging.rewound(12, [])


def test_a_judge_that_is_told_the_last_steps_rules_as_the_one_that_saw_them():
    steps = healthy(300)
    saw, told = judge(), judge()
    for step in steps:
        assert saw.rule(*step).verdict is COMMIT
    told.remember(steps[-128:])
    assert told.limits(300) == saw.limits(300)


def test_losses_of_another_mixture_are_not_compared_with():
    judging = judge(stage_of=lambda step: step // 100)
    judging.remember(healthy())
    assert judging.rule(99, 6.0, 0.5).reason is Reason.LOSS_SPIKE
    assert all(judging.rule(100 + s, loss, norm).verdict is COMMIT for s, loss, norm in healthy(100, loss=6.0))
    assert judging.rule(199, 9.0, 0.5).reason is Reason.LOSS_SPIKE


def curves(draw: np.random.Generator) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Losses and gradient norms of runs that nothing is wrong with, as they are seen: 4000 steps each."""
    steps = np.arange(4000.0)
    falling = 2.5 + 8.0 * (steps + 5) ** -0.35
    slow = np.convolve(draw.normal(size=steps.size + 49), np.ones(50) / 50**0.5, "valid")  # norms wander
    norm = 0.4 + 3.0 * (steps + 10) ** -0.4
    yield "large batches", falling + 0.01 * draw.normal(size=4000), norm * np.exp(0.05 * draw.normal(size=4000))
    yield "small batches", falling + 0.25 * draw.normal(size=4000), norm * np.exp(0.3 * draw.normal(size=4000))
    yield "heavy tails", falling + 0.05 * draw.standard_t(6, 4000), norm * np.exp(0.1 * draw.standard_t(6, 4000))
    yield "wandering norms", falling + 0.05 * draw.normal(size=4000), norm * np.exp(0.3 * slow)
    yield "a plateau, then a fall", np.where(steps < 2000, 5.0, 3.0) + 0.02 * draw.normal(size=4000), norm
    yield "growing norms", falling, 0.2 * np.exp(steps / 2000 + 0.1 * draw.normal(size=4000))


@pytest.mark.slow
def test_no_step_of_a_healthy_run_is_called_bad():
    """At most 1 in 20,000, over curves of many kinds: heavy tails are where that one would come from."""
    judged = bad = 0
    for seed in range(5):
        for _, losses, norms in curves(np.random.default_rng(seed)):
            judging = judge()
            for step, (loss, norm) in enumerate(zip(losses.tolist(), norms.tolist(), strict=True)):
                bad += judging.rule(step, loss, norm).reason is not None
                judged += 1
    assert bad <= judged / 20_000, f"{bad} of {judged}"


@pytest.mark.parametrize("factor", [8.0, 100.0, 1e6])
def test_a_gradient_that_is_off_by_a_bit_of_its_exponent_is_seen(factor):
    for seed in range(20):
        judging = judge()
        judging.remember(healthy(200, seed))
        assert judging.rule(200, 3.0, 0.5 * factor).reason is Reason.NORM_OUTLIER
