"""The newest state of which every part is offered, alike on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from argosy.checkpoint.boxes import Box
from argosy.checkpoint.history import History, Position
from argosy.training.offers import Offer, newest_whole_state


def box(rows: tuple[int, int], name: str = "model.w") -> Box:
    return Box(name, "float32", (4,), (rows[0],), (rows[1] - rows[0],))


WHOLE, UPPER, LOWER = box((0, 4)), box((0, 2)), box((2, 4))
FIRST = History().next("a1", 0)
SECOND = FIRST.next("b2", 20)


def offer(step: int, *boxes: Box, history: History = FIRST, live: bool = False, skipped: int = 0) -> Offer:
    return Offer(history, Position(step, 0, ((7, 8),) * skipped), boxes, live)


def newest(*offers: Sequence[Offer], history: History = FIRST, wanted: Box = WHOLE) -> tuple[str, int, bool] | None:
    found = newest_whole_state(offers, [[wanted]] * len(offers), history)
    return None if found is None else (found.history.world, found.position.step, found.is_live)


def test_what_one_survivor_has_all_of_is_taken():
    assert newest([offer(5, WHOLE, live=True)], []) == ("a1", 5, True)


def test_survivors_and_in_memory_checkpoints_of_one_step_make_a_whole():
    assert newest([offer(5, UPPER, live=True)], [offer(5, LOWER), offer(3, LOWER), offer(3, UPPER)]) == ("a1", 5, False)


def test_parts_of_different_steps_are_no_whole():
    assert newest([offer(5, UPPER, live=True), offer(3, UPPER)], [offer(4, LOWER)]) is None
    assert newest([offer(5, UPPER, live=True), offer(3, UPPER)], [offer(4, LOWER), offer(3, LOWER)]) == ("a1", 3, False)


def test_parts_of_different_worlds_are_no_whole_even_of_one_step():
    assert newest([offer(20, UPPER)], [offer(20, LOWER, history=SECOND)], history=SECOND) is None


def test_what_the_run_has_turned_away_from_is_not_taken_up_again():
    stray = [offer(step, WHOLE) for step in (15, 20, 25, 30)]
    assert newest(stray, [], history=SECOND) == ("a1", 20, False)
    assert newest(stray, [], history=SECOND.next("c3", 15)) == ("a1", 15, False)
    assert newest(stray, [], history=FIRST.turned_back(15)) == ("a1", 15, False)
    assert newest(stray, [], history=History().next("d4", 0)) is None


def test_skipped_samples_that_one_rank_knows_of_count_for_all():
    held = [[offer(5, WHOLE, live=True)], [offer(5, WHOLE, live=True, skipped=1)]]
    found = newest_whole_state(held, [[WHOLE]] * 2, FIRST)
    assert found is not None and found.position.skipped == ((7, 8),)


def test_the_loss_scale_is_one_rank_s_for_all_and_may_be_missing():
    scale = box((0, 4), "scaler.scale")
    held = [[offer(5, WHOLE, scale, live=True)], [offer(5, WHOLE, scale, live=True, skipped=1)]]
    found = newest_whole_state(held, [[WHOLE, scale]] * 2, FIRST)
    assert found is not None and {t.sender for t in found.transfers if t.wanted == scale} == {1}
    assert newest_whole_state([[offer(5, WHOLE, live=True)]], [[WHOLE, scale]], FIRST) is not None
