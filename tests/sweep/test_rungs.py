"""Successive halving promotes the best of a rung once all have come to it."""

from __future__ import annotations

from argosy.sweep.rungs import halving, hyperband, judge


def test_rungs_end_at_the_whole_run_and_divide_by_eta() -> None:
    (bracket,) = halving(trials=27, steps=2700, eta=3)
    assert bracket.steps == (100, 300, 900, 2700) and bracket.counts == (27, 9, 3, 1)
    (bracket,) = halving(trials=27, steps=2700, eta=3, min_steps=900)
    assert bracket.steps == (900, 2700) and bracket.counts == (27, 9)
    (short,) = halving(trials=1000, steps=5, eta=2)
    assert short.steps == (1, 2, 5)


def test_hyperband_has_the_brackets_of_its_paper() -> None:
    """Li et al. 2018, table 1: R = 81, eta = 3."""
    brackets = hyperband(steps=81, eta=3, min_steps=1)
    assert [bracket.counts[0] for bracket in brackets] == [81, 34, 15, 8, 5]
    assert [bracket.steps[0] for bracket in brackets] == [1, 3, 9, 27, 81]
    assert [bracket.first for bracket in brackets] == [0, 81, 115, 130, 138]


def test_nothing_is_promoted_before_all_have_come_to_the_rung() -> None:
    (bracket,) = halving(trials=4, steps=100, eta=2)
    scores = {0: {25: 1.0}, 1: {25: 2.0}, 2: {25: 3.0}, 3: {}}
    found = judge(bracket, scores, failed=[], minimize=True)
    assert found.stopped == [] and found.train == {3: 0}
    found = judge(bracket, scores, failed=[3], minimize=True)
    assert found.stopped == [2] and found.train == {0: 1, 1: 1}
    found = judge(bracket, scores, failed=[3], minimize=False)
    assert found.stopped == [0] and found.train == {1: 1, 2: 1}


def test_trials_that_are_not_proposed_yet_are_waited_for() -> None:
    (bracket,) = halving(trials=4, steps=100, eta=2)
    assert judge(bracket, {0: {25: 1.0}, 1: {}}, failed=[], minimize=True).train == {1: 0}


def test_what_was_stopped_before_a_kill_is_stopped_again() -> None:
    (bracket,) = halving(trials=4, steps=100, eta=2)
    scores = {0: {25: 1.0, 50: 1.0}, 1: {25: 2.0, 50: 0.5}, 2: {25: 3.0}, 3: {25: 4.0}}
    found = judge(bracket, scores, failed=[], minimize=True)
    assert found.stopped == [2, 3, 0] and found.train == {1: 2}
