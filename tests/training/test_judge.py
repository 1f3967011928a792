"""A step that is not finite does not touch the weights, and a run of nothing else ends."""

from __future__ import annotations

import math

import pytest

from argosy.errors import RunFailed
from argosy.training.judge import MOST_IN_A_ROW, Judge, Verdict

BAD = [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf), (-math.inf, math.nan)]


def test_a_finite_step_is_committed():
    assert Judge().rule(0, loss=5.0, gradient_norm=1e30) is Verdict.COMMIT


@pytest.mark.parametrize(("loss", "norm"), BAD)
def test_a_step_that_is_not_finite_is_skipped(loss, norm):
    assert Judge().rule(0, loss, norm) is Verdict.SKIP


def test_bad_steps_in_a_row_end_the_run_with_what_to_try():
    judge = Judge()
    assert [judge.rule(step, math.nan, 1.0) for step in range(MOST_IN_A_ROW - 1)] == [Verdict.SKIP] * 4
    with pytest.raises(RunFailed, match=r"loss nan, gradient norm 1\.0 at step 4: .* Try a smaller optimizer\.lr"):
        judge.rule(4, math.nan, 1.0)


def test_a_good_step_between_bad_ones_forgives_them():
    judge = Judge()
    for _ in range(3):
        for step in range(MOST_IN_A_ROW - 1):
            assert judge.rule(step, math.inf, 1.0) is Verdict.SKIP
        assert judge.rule(5, 5.0, 1.0) is Verdict.COMMIT
