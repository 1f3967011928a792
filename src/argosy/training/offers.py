"""Which state a new world can start from, given what its ranks offer: the newest of which every part is offered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import reduce

from argosy.checkpoint.boxes import Box, Misfit
from argosy.checkpoint.directory import Transfer, match
from argosy.checkpoint.history import History, Position
from argosy.parallel.peers import Peers, Talk
from argosy.training.sync_memory import NOTHING, Past


@dataclass(frozen=True)
class Claim:
    """The state that an offer is of, as other ranks hear of it."""

    history: History
    position: Position
    is_live: bool
    past: Past = NOTHING
    """What compressors kept, as far as the offer's boxes tell."""

    @property
    def moment(self) -> tuple[str, int]:
        """The world that was in the state, and its step: offers of one moment fit together."""
        return self.history.world, self.position.step


@dataclass(frozen=True)
class Offer:
    """A state, or a part of one, that this rank can send."""

    claim: Claim
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class WholeState:
    """A state of which every part is offered."""

    history: History
    position: Position
    is_live: bool
    """True if survivors have all of it; otherwise some comes from in-memory checkpoints."""
    leader: int
    """The rank whose loss scale counts for all."""
    used: tuple[int, ...]
    """Which of this rank's offers; live ones come first."""
    transfers: tuple[Transfer, ...]
    """This rank's."""
    past: Past = NOTHING
    """What compressors kept."""


Leader = tuple[int, int, History, Position]
"""How many samples its offer skips, the rank negated, what its offer is of: the largest leads."""


def newest_whole_state(
    peers: Peers,
    offers: Sequence[Offer],
    claims: Collection[Claim],
    wanted: Callable[[Past], Collection[Box]],
    history: History,
    is_whole: Callable[[int], bool] = lambda offer: True,
) -> Talk[WholeState | None]:
    """Return the newest state of which every part is offered, and what this rank sends and receives of it.

    `offers` are this rank's, `wanted` says what it wants of a state, `claims` are those of all ranks. `history` is
    where the run stands; states that it has turned away from do not count. `is_whole(i)` tells if offer i is undamaged;
    it is asked once it may be used.
    """
    moments = {claim.moment for claim in claims if history.admits(*claim.moment)}
    # Among equal steps the newer world's comes first: an older one's may be from before the run went back.
    for moment in sorted(moments, key=lambda m: (m[1], m[0] == history.world, m[0]), reverse=True):
        past = reduce(Past.joined, (claim.past for claim in claims if claim.moment == moment))
        of_moment = {claim.is_live for claim in claims if claim.moment == moment}
        for live_only in (True, False):
            if live_only not in of_moment:
                continue
            used = tuple(
                i
                for i, offer in enumerate(offers)
                if offer.boxes
                and offer.claim.moment == moment
                and (offer.claim.is_live or (not live_only and is_whole(i)))
            )
            found = yield from _of(peers, [offers[i] for i in used], wanted(past))
            if found is not None:
                (_, rank, lived, position), transfers = found
                return WholeState(lived, position, live_only, -rank, used, tuple(transfers), past)
    return None


def is_scale(box: Box) -> bool:
    """True if the box is of the loss scale.

    One rank's counts for all: it may have changed, with no step made, where other ranks did not hear of it.
    """
    return box.name.startswith("scaler.")


def _of(peers: Peers, used: Sequence[Offer], wanted: Collection[Box]) -> Talk[tuple[Leader, list[Transfer]] | None]:
    """Return who leads, and this rank's transfers, if all that is wanted is there."""
    claims = [offer.claim for offer in used]
    mine = max(
        ((len(c.position.skipped), -peers.rank, c.history, c.position) for c in claims), key=_rank_of, default=None
    )
    leader = yield from peers.merge(mine, Leader | None, _leading)
    if leader is None:
        return None
    held = [box for offer in used for box in offer.boxes if not is_scale(box)]
    transfers = yield from match(peers, held, [box for box in wanted if not is_scale(box)])
    return None if isinstance(transfers, Misfit) else (leader, transfers)


def _leading(one: Leader | None, other: Leader | None) -> Leader | None:
    return max((some for some in (one, other) if some is not None), key=_rank_of, default=None)


def _rank_of(leader: Leader) -> tuple[int, int]:
    return leader[:2]
