"""A history tells the states that its run has been in from those that it has turned away from."""

from __future__ import annotations

import pytest

from argosy.checkpoint.history import History, Position, from_metadata, to_metadata

FIRST = History().next("a1", 0)
SECOND = FIRST.next("b2", 20)


def test_position_and_history_go_through_the_metadata_of_a_file():
    position = Position(7, 700, ((1, 2), (5, 9)), 3, "5a")
    assert from_metadata(to_metadata(position, SECOND)) == (position, SECOND)


@pytest.mark.parametrize("wrong", [{"position": "7"}, {"position": '[7, 700, 3, 0, ""]'}, {"history": "[1, [2], 3]"}])
def test_metadata_of_something_else_are_a_value_error(wrong):
    with pytest.raises(ValueError):
        from_metadata(to_metadata(Position(7, 700), SECOND) | wrong)


def test_states_after_the_step_at_which_another_world_took_over_do_not_count():
    assert SECOND.admits("a1", 20) and not SECOND.admits("a1", 21)
    assert SECOND.admits("b2", 21) and not SECOND.admits("c3", 1)


def test_a_world_that_goes_back_has_another_name_and_leaves_its_later_steps():
    back = SECOND.turned_back(10)
    assert back.admits("b2", 10) and not back.admits("b2", 11) and not back.admits("a1", 11)
    assert back.world not in ("", "a1", "b2") and back.depth == SECOND.depth + 1
