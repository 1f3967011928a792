"""Which state a new world can start from, given what its ranks offer: the newest of which every part is offered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from argosy.checkpoint.boxes import Box, Misfit
from argosy.checkpoint.exchange import Transfer, route
from argosy.checkpoint.history import History, Position


@dataclass(frozen=True)
class Offer:
    """A state, or a part of one, that a rank can send."""

    history: History
    position: Position
    boxes: tuple[Box, ...]
    is_live: bool

    @property
    def moment(self) -> tuple[str, int]:
        """The world that was in the state, and its step: offers of one moment fit together."""
        return self.history.world, self.position.step


@dataclass(frozen=True)
class WholeState:
    """A state of which every part is offered."""

    history: History
    position: Position
    is_live: bool
    """True if survivors have all of it; otherwise some comes from in-memory checkpoints."""
    used: tuple[tuple[int, ...], ...]
    """By rank, which of its offers; live ones come first."""
    transfers: tuple[Transfer, ...]


def newest_whole_state(
    offers: Sequence[Sequence[Offer]], wanted: Sequence[Sequence[Box]], history: History
) -> WholeState | None:
    """Return the newest state of which every part is offered, and what each rank sends to which.

    `offers` and `wanted` are by rank. `history` is where the run stands; states that it has turned away from do not
    count. The result follows from the arguments alone, so that all ranks find the same.
    """
    moments = {offer.moment for own in offers for offer in own if history.admits(*offer.moment)}
    # Among equal steps the newer world's comes first: an older one's may be from before the run went back.
    for moment in sorted(moments, key=lambda m: (m[1], m[0] == history.world, m[0]), reverse=True):
        for live_only in (True, False):
            used = [
                tuple(i for i, o in enumerate(own) if o.boxes and o.moment == moment and (o.is_live or not live_only))
                for own in offers
            ]
            chosen = [[own[i] for i in some] for own, some in zip(offers, used, strict=True)]
            leader = max((o for own in chosen for o in own), key=lambda o: len(o.position.skipped), default=None)
            if leader is None:
                continue
            transfers = route(*_matched(chosen, wanted, leader))
            if not isinstance(transfers, Misfit):
                return WholeState(leader.history, leader.position, live_only, tuple(used), tuple(transfers))
    return None


def _matched(
    chosen: Sequence[Sequence[Offer]], wanted: Sequence[Sequence[Box]], leader: Offer
) -> tuple[list[list[Box]], list[list[Box]]]:
    """Return what ranks hold and want of one state.

    One rank's loss scale counts for all: it may have changed, with no step made, where other ranks did not hear of it.
    Not all states have one.
    """
    held = [[box for offer in own for box in offer.boxes if offer is leader or not _is_scale(box)] for own in chosen]
    there = {box.name for own in held for box in own}
    return held, [[box for box in wants if box.name in there or not _is_scale(box)] for wants in wanted]


def _is_scale(box: Box) -> bool:
    return box.name.startswith("scaler.")
