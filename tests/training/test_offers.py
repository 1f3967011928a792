"""The newest state of which every part is offered, alike on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from argosy.checkpoint.boxes import Box
from argosy.checkpoint.history import History, Position
from argosy.parallel.peers import Peers, Talk, together
from argosy.training.offers import Claim, Offer, WholeState, newest_whole_state


def box(rows: tuple[int, int], name: str = "model.w") -> Box:
    return Box(name, "float32", (4,), (rows[0],), (rows[1] - rows[0],))


WHOLE, UPPER, LOWER = box((0, 4)), box((0, 2)), box((2, 4))
FIRST = History().next("a1", 0)
SECOND = FIRST.next("b2", 20)


def offer(step: int, *boxes: Box, history: History = FIRST, live: bool = False, skipped: int = 0) -> Offer:
    return Offer(Claim(history, Position(step, 0, ((7, 8),) * skipped), live), boxes)


def asked(
    *offers: Sequence[Offer], history: History = FIRST, wanted: Sequence[Box] = (WHOLE,), damaged: Sequence[Offer] = ()
) -> list[WholeState | None]:
    """What each rank finds."""

    def rank(peers: Peers, mine: Sequence[Offer]) -> Talk[WholeState | None]:
        claims = yield from peers.union((offer.claim for offer in mine), Claim)
        is_whole = lambda i: all(mine[i] is not bad for bad in damaged)  # noqa: E731
        return (yield from newest_whole_state(peers, mine, claims, lambda past: wanted, history, is_whole))

    return together([rank(Peers(i, len(offers)), mine) for i, mine in enumerate(offers)])


def newest(*offers: Sequence[Offer], history: History = FIRST, damaged: Sequence[Offer] = ()) -> object:
    (answer,) = {
        None if found is None else (found.history.world, found.position.step, found.is_live)
        for found in asked(*offers, history=history, damaged=damaged)
    }
    return answer


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


def test_an_in_memory_checkpoint_that_is_damaged_is_none():
    damaged = offer(5, LOWER)
    others = [offer(5, UPPER), offer(3, UPPER)], [damaged, offer(3, LOWER)]
    assert newest(*others, damaged=[damaged]) == ("a1", 3, False)
    assert newest(*others, [offer(5, LOWER)], damaged=[damaged]) == ("a1", 5, False)


def test_skipped_samples_that_one_rank_knows_of_count_for_all():
    for found in asked([offer(5, WHOLE, live=True)], [offer(5, WHOLE, live=True, skipped=1)]):
        assert found is not None and found.position.skipped == ((7, 8),)


def test_the_loss_scale_is_one_rank_s_for_all_and_may_be_missing():
    scale = box((0, 4), "scaler.scale")
    held = [[offer(5, WHOLE, scale, live=True)], [offer(5, WHOLE, scale, live=True, skipped=1)]]
    for found in asked(*held, wanted=[WHOLE, scale]):
        assert found is not None and found.leader == 1 and all(t.wanted != scale for t in found.transfers)
    alike = [offer(5, WHOLE, scale, live=True)]
    assert [found.leader for found in asked([], alike, alike) if found] == [1, 1, 1]
    assert None not in asked([offer(5, WHOLE, live=True)], wanted=[WHOLE, scale])
