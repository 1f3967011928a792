"""Bad steps are told from good ones, and what becomes of them follows the policy; healthy curves are left alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from argosy.config.schema import ResilienceConfig
from argosy.training.bad_steps import MOST_BAD_STEPS, MOST_REWINDS, Action, BadStep, BadStepCounts, BadStepPolicy

NOT_FINITE = [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf), (-math.inf, math.nan)]
APPLY, RETRY, SKIP, REWIND, STOP = Action.APPLY, Action.RETRY, Action.SKIP, Action.REWIND, Action.STOP


def policy(stage_of: Callable[[int], int] = lambda step: 0, **settings: object) -> BadStepPolicy:
    return BadStepPolicy(ResilienceConfig.model_validate(settings), stage_of)


def healthy(steps: int = 100, seed: int = 0, loss: float = 3.0) -> list[tuple[int, float, float]]:
    """Steps of a run whose loss and norm vary a little."""
    draw = np.random.default_rng(seed)
    return [(s, loss + 0.05 * draw.normal(), 0.5 * math.exp(0.1 * draw.normal())) for s in range(steps)]


def settled(**settings: object) -> BadStepPolicy:
    settled = policy(**settings)
    settled.remember(healthy())
    return settled


def twice(steps: BadStepPolicy, step: int, loss: float, norm: float) -> tuple[Action, BadStep | None]:
    """What is done with a step that looks bad, and looks the same when it is done again."""
    assert steps.decide(step, loss, norm)[0] is RETRY
    return steps.decide(step, loss, norm)


def test_a_finite_step_is_applied_while_there_is_nothing_to_compare_it_with():
    assert policy().decide(0, loss=5.0, gradient_norm=1e30) == (APPLY, None)


@pytest.mark.parametrize(("loss", "norm"), NOT_FINITE)
def test_a_step_that_is_not_finite_is_skipped(loss, norm):
    action, bad = twice(policy(), 0, loss, norm)
    assert (action, bad.reason) == (SKIP, "not_finite")


@pytest.mark.parametrize(
    ("loss", "norm", "reason"),
    [
        (3.1, 0.6, None),
        (1.0, 1e-9, None),  # what is far below is good news
        (5.0, 0.6, "loss_spike"),
        (3.1, 50.0, "norm_outlier"),
        (3.1, 1.0, None),  # a norm twice its median is for clipping
    ],
)
def test_what_is_far_above_the_steps_before_is_bad(loss, norm, reason):
    steps = settled()
    largest = steps.limits(100)
    action, bad = twice(steps, 100, loss, norm) if reason else steps.decide(100, loss, norm)
    assert action is (SKIP if reason else APPLY)
    assert bad == (BadStep(100, reason, loss, norm, *largest, in_a_row=1) if reason else None)


@pytest.mark.parametrize("usual", [3.0, -3.0])  # a loss of one's own may be below zero
def test_where_losses_hardly_vary_a_percent_is_no_spike(usual):
    steps = policy()
    steps.remember((step, usual, 0.5) for step in range(100))
    assert steps.decide(100, usual + 0.03, 0.5) == (APPLY, None)
    assert twice(steps, 101, usual + 3.0, 0.5)[0] is SKIP


@pytest.mark.parametrize("on_bad_step", ["skip", "rewind", "stop"])
@pytest.mark.parametrize(("loss", "norm"), [*NOT_FINITE, (5.0, 0.6), (3.1, 50.0)])
def test_what_is_good_when_it_is_done_again_was_no_bad_step(on_bad_step, loss, norm):
    steps, other = settled(on_bad_step=on_bad_step), settled(on_bad_step=on_bad_step)
    action, first_try = steps.decide(100, loss, norm)
    assert action is RETRY and first_try.in_a_row == 0
    assert steps.decide(100, 3.1, 0.6) == (APPLY, first_try)
    other.decide(100, 3.1, 0.6)
    assert steps.limits(101) == other.limits(101)
    assert steps.decide(101, 3.1, 0.6) == (APPLY, None)


def test_each_step_that_looks_bad_is_done_again_once():
    steps = policy()
    for _ in range(2):  # the same step with other samples is another
        assert twice(steps, 3, math.nan, 1.0)[0] is SKIP


def test_counts_go_on_in_a_new_world_from_the_rank_that_has_the_newest():
    before, new = policy(), policy()
    twice(before, 7, math.nan, 1.0)
    new.load_newest([policy().counts(), new.counts(), before.counts()])
    assert new.counts() == before.counts()
    tries = [twice(new, 7, math.nan, 1.0) for _ in range(MOST_BAD_STEPS - 1)]
    assert [bad.in_a_row for _, bad in tries] == [2, 3, 4, 5] and tries[-1][0] is STOP
    assert before.counts().in_a_row == 1, "they share nothing"


def test_a_step_that_looked_bad_in_the_last_world_is_not_done_again_twice():
    before = policy()
    assert before.decide(7, math.nan, 1.0)[0] is RETRY
    new = BadStepPolicy(ResilienceConfig(), counted=before.counts())
    assert new.decide(7, math.nan, 1.0)[0] is SKIP


def test_rewinds_are_counted_on_where_the_state_is_an_older_one():
    steps = policy()
    assert steps.rewound(6)
    twice(steps, 6, math.nan, 1.0)
    steps.forget_bad_steps()
    assert steps.counts() == BadStepCounts(decisions=2, in_a_row=0, first_try=None, rewinds={6: 1})


def test_a_detector_that_is_switched_off_sees_nothing():
    assert settled(loss_spike_sigmas=0).decide(100, 50.0, 0.6) == (APPLY, None)
    assert settled(norm_outlier_sigmas=0).decide(100, 3.1, 1e9) == (APPLY, None)


def test_bad_steps_do_not_move_what_the_next_ones_are_compared_with():
    one, other = settled(), settled()
    for _ in range(MOST_BAD_STEPS - 1):
        twice(one, 100, 9.0, 0.6)
    assert one.limits(100) == other.limits(100)


def test_bad_steps_in_a_row_end_the_run():
    steps = policy()
    tries = [twice(steps, 7, math.nan, 1.0) for _ in range(MOST_BAD_STEPS)]
    assert [action for action, _ in tries] == [SKIP] * (MOST_BAD_STEPS - 1) + [STOP]
    assert [bad.in_a_row for _, bad in tries] == [1, 2, 3, 4, 5]


def test_a_good_step_between_bad_ones_forgives_them():
    steps = policy()
    for _ in range(3):
        for _ in range(MOST_BAD_STEPS - 1):
            assert twice(steps, 4, math.inf, 1.0)[0] is SKIP
        assert steps.decide(5, 5.0, 1.0)[0] is APPLY


def test_the_policy_stop_ends_the_run_at_the_first_bad_step():
    assert twice(policy(on_bad_step="stop"), 0, math.nan, 1.0)[0] is STOP


def test_the_policy_rewind_goes_back_after_bad_steps_in_a_row():
    steps = policy(on_bad_step="rewind", rewind_after=2)
    assert [twice(steps, 9, math.nan, 1.0)[0] for _ in range(2)] == [SKIP, REWIND]
    assert steps.rewound(6)
    steps.remember(healthy(6))
    assert [steps.decide(6, 3.0, 0.5)[0], twice(steps, 7, math.nan, 1.0)[0]] == [APPLY, SKIP]


def test_with_nothing_to_go_back_to_bad_steps_are_skipped_until_the_run_ends():
    steps = policy(on_bad_step="rewind", rewind_after=2)
    actions = [twice(steps, 9, math.nan, 1.0)[0] for _ in range(MOST_BAD_STEPS)]
    assert actions == [SKIP, REWIND, SKIP, SKIP, STOP]


def test_a_run_goes_back_to_the_same_step_only_so_often():
    steps = policy(on_bad_step="rewind")
    assert [steps.rewound(6) for _ in range(MOST_REWINDS + 1)] == [True] * MOST_REWINDS + [False]
    assert steps.rewound(12)


def test_a_policy_that_is_told_the_last_steps_decides_as_the_one_that_saw_them():
    seen = healthy(300)
    saw, told = policy(), policy()
    for step in seen:
        assert saw.decide(*step)[0] is APPLY
    told.remember(seen[-128:])
    assert told.limits(300) == saw.limits(300)


def test_losses_of_another_mixture_are_not_compared_with():
    steps = policy(stage_of=lambda step: step // 100)
    steps.remember(healthy())
    assert steps.decide(99, 6.0, 0.5)[1].reason == "loss_spike"
    assert all(steps.decide(100 + s, loss, norm)[0] is APPLY for s, loss, norm in healthy(100, loss=6.0))
    assert steps.decide(199, 9.0, 0.5)[1].reason == "loss_spike"


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
    seen = bad = 0
    for seed in range(5):
        for _, losses, norms in curves(np.random.default_rng(seed)):
            steps = policy()
            for step, (loss, norm) in enumerate(zip(losses.tolist(), norms.tolist(), strict=True)):
                bad += steps.decide(step, loss, norm)[0] is not APPLY
                seen += 1
    assert bad <= seen / 20_000, f"{bad} of {seen}"


@pytest.mark.parametrize("factor", [8.0, 100.0, 1e6])
def test_a_gradient_that_is_off_by_a_bit_of_its_exponent_is_seen(factor):
    for seed in range(20):
        steps = policy()
        steps.remember(healthy(200, seed))
        assert steps.decide(200, 3.0, 0.5 * factor)[1].reason == "norm_outlier"
