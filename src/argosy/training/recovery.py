"""Recovery: the ranks of a new world agree on the newest state of which every part is there, and take it over.

They look in this order, which is that of age: what survivors of the last world still hold (no step is lost), in-memory
checkpoints, the newest whole checkpoint on disk. A survivor whose update was under way offers nothing; one that has its
whole gradient, where another rank has applied it already, applies it now: from the same numbers, so to the same bits.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from argosy.checkpoint.boxes import Box, Misfit
from argosy.checkpoint.directory import Transfer, match
from argosy.checkpoint.exchange import CorruptMessage, Traffic, carry, travels
from argosy.checkpoint.history import History, Position
from argosy.checkpoint.memory import MemoryCheckpoint, memory_checkpoints_in, node_name
from argosy.checkpoint.shards import TensorsToSave, box_bytes
from argosy.errors import ArgosyError
from argosy.faults import fault
from argosy.parallel.encoding import ErrorRecord, SentTensor
from argosy.parallel.peers import Peers, Talk, over, peers_of
from argosy.parallel.world import World
from argosy.training.checkpointer import Checkpointer
from argosy.training.state import StepUpdate, TrainState
from argosy.training.sync_memory import NO_PAST, SavedSyncState


@dataclass(frozen=True)
class Claim:
    """The state that an offer is of, as other ranks hear of it."""

    history: History
    position: Position
    is_live: bool
    past: SavedSyncState = NO_PAST
    """Compressor state, as far as the offer's boxes tell."""

    @property
    def moment(self) -> tuple[str, int]:
        """The world that was in the state, and its step: offers of one moment fit together."""
        return self.history.world, self.position.step


@dataclass(frozen=True)
class RecoveryOffer:
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
    """Indices of this rank's offers that are used; live ones come first."""
    transfers: tuple[Transfer, ...]
    """This rank's."""
    past: SavedSyncState = NO_PAST
    """Compressor state."""


Leader = tuple[int, int, History, Position]
"""Samples that its offer skips, the rank negated, history and position of its offer: the largest leads."""


def newest_whole_state(
    peers: Peers,
    offers: Sequence[RecoveryOffer],
    claims: Collection[Claim],
    wanted: Callable[[SavedSyncState], Collection[Box]],
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
        past = reduce(SavedSyncState.joined, (claim.past for claim in claims if claim.moment == moment))
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


def _of(
    peers: Peers, used: Sequence[RecoveryOffer], wanted: Collection[Box]
) -> Talk[tuple[Leader, list[Transfer]] | None]:
    """Return the leading rank and this rank's transfers, if all that is wanted is there."""
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


EXCHANGE_ATTEMPTS = 3
"""Tries of an exchange in which a message is corrupt: its sender still has what it was to be."""

Tier = Literal["live", "memory", "disk", "none"]


@dataclass(frozen=True)
class Recovery:
    """The state that a world starts from; the same on all ranks."""

    tier: Tier
    """none: there was nothing; the state is as it was."""
    step: int
    steps_lost: int
    """Steps that a survivor, an in-memory checkpoint or a checkpoint shows to have been made, and that have to be made
    again. If no rank that made them lives, metrics.jsonl may tell of more."""
    sent_bytes: int
    """Sent from rank to rank, in all."""
    own_bytes: int
    """Found by ranks in their own memory, in all."""
    seconds: float
    refused: tuple[str, ...] = ()
    """In-memory checkpoints that were not what was written, and why the newest checkpoint could not be used."""
    last_update: StepUpdate | None = None
    """The update of the last step, if a survivor knows it: the rank that was to write its metrics may be gone."""


@dataclass(frozen=True)
class SurvivorFacts:
    """A survivor's description of its state; most say the same."""

    history: History
    position: Position
    last_update: StepUpdate | None

    @classmethod
    def of(cls, survivor: TrainState) -> SurvivorFacts:
        """Return the facts of this process."""
        return cls(survivor.history, survivor.position, survivor.last_update)


def recover(
    state: TrainState, survivor: TrainState | None, disk: Checkpointer, folder: Path | None, world: World
) -> Recovery:
    """Fill `state`, which is laid out for `world`, with the newest state that there is. All ranks call it together.

    `survivor`: what this process holds of the world that it comes from, if it was in one; it may be taken forward by
    one step. `folder`: the in-memory checkpoints of this node. Afterwards the history of `state` has one world more.

    Raises: RuntimeError if a rank is gone; CorruptMessage if messages arrive damaged again and again; ArgosyError if
    there are checkpoints, and neither they nor anything else can be used. Until it returns the survivor is whole.
    """
    began = time.monotonic()
    group, peers = world.host_group, peers_of(world.host_group)
    facts = over(group, peers.union([] if survivor is None else [SurvivorFacts.of(survivor)], SurvivorFacts))
    follow(survivor, facts)
    here = over(group, peers.alike(node_name()))
    sources = _Sources([*_live(survivor), *_in_memory(folder, here.index(world.rank), len(here))])
    claims = over(group, peers.union((source.offer.claim for source in sources), Claim))
    said: list[SurvivorFacts | Claim] = [*facts, *claims]
    history = max((some.history for some in said), key=lambda h: (h.depth, h.world), default=History())

    def wanted(past: SavedSyncState) -> list[Box]:
        return [box for box in state.to_save(past) if travels(box)]

    offers = [source.offer for source in sources]
    found = over(group, newest_whole_state(peers, offers, claims, wanted, history, sources.is_whole))
    refused = over(group, peers.union(sources.refused, str))

    fault("recover", rank=world.rank)
    tier: Tier = "none"
    traffic = Traffic()
    newest_on_disk = disk.newest_step() or 0
    if found is None or newest_on_disk > found.position.step:
        tier, problem = _from_disk(disk, state, group)
        if problem is not None:
            if found is None:
                raise problem
            refused.append(str(problem))
    if found is not None and (tier == "none" or state.step < found.position.step):
        tier = "live" if found.is_live else "memory"
        traffic = over(group, peers.merge(_take(found, sources, state, survivor, group), Traffic, _sum))
    past = state.history if tier == "disk" and state.history.depth > history.depth else history
    name = over(group, peers.merge(secrets.token_hex(6) if world.is_first else "", str, max))
    state.history = past.next(name, state.step)
    return Recovery(
        tier,
        state.step,
        max(newest_on_disk, state.step, *_steps_known(said, history)) - state.step,
        traffic.received_bytes,
        traffic.own_bytes,
        time.monotonic() - began,
        tuple(refused),
        next((u for u in (f.last_update for f in facts) if u is not None and u.step == state.step - 1), None),
    )


def follow(survivor: TrainState | None, facts: Sequence[SurvivorFacts]) -> None:
    """Make the update that other ranks have made already, if this survivor has all that it takes.

    No rank makes one before all have their gradients whole (`TrainState`), so others are ahead by one step at most;
    what they know of it is all that was missing here.
    """
    if survivor is None or survivor.in_update:
        return
    others = [ahead for ahead in facts if ahead.history == survivor.history]
    if survivor.pending and survivor.can_follow:
        update = next((u for u in (ahead.last_update for ahead in others) if u and u.step == survivor.step), None)
        if update is not None:
            survivor.apply(update)
    if survivor.outer is not None and not survivor.pending:  # what an outer step takes is in the site's folder
        for rounds in range(survivor.rounds, max((ahead.position.rounds for ahead in others), default=0)):
            survivor.apply_outer(rounds)


@dataclass(frozen=True)
class _Source:
    """State that this rank can offer, and its place in memory."""

    offer: RecoveryOffer
    live: Mapping[Box, Tensor]
    saved: MemoryCheckpoint | None = None

    def is_whole(self) -> bool:
        return self.saved is None or self.saved.is_whole()

    def tensors(self) -> Mapping[Box, Tensor]:
        if self.saved is None:
            return self.live
        mapped = self.saved.file.mapped()  # not read: the node has the file in memory already
        return {box: mapped[box] for box in self.offer.boxes}

    @property
    def name(self) -> str:
        return f"{self.saved.path.name} of node {node_name()}" if self.saved else ""


class _Sources(list[_Source]):
    """State of this rank; in-memory checkpoints are read once it matters whether they are whole."""

    def __init__(self, sources: list[_Source]):
        super().__init__(sources)
        self._whole: dict[int, bool] = {}

    def is_whole(self, i: int) -> bool:
        if i not in self._whole:
            self._whole[i] = self[i].is_whole()
        return self._whole[i]

    @property
    def refused(self) -> list[str]:
        """Names of those that were not whole."""
        return [self[i].name for i, is_whole in self._whole.items() if not is_whole]


def _live(survivor: TrainState | None) -> list[_Source]:
    if survivor is None or survivor.in_update:
        return []
    tensors = survivor.to_save()
    boxes = tuple(box for box in tensors if travels(box))
    claim = Claim(survivor.history, survivor.position, is_live=True, past=SavedSyncState.of(boxes))
    return [_Source(RecoveryOffer(claim, boxes), tensors)]


def _in_memory(folder: Path | None, place: int, ranks: int) -> list[_Source]:
    """Return this rank's part of the in-memory checkpoints of its node: they are dealt out over the node's ranks."""
    sources = []
    for saved in memory_checkpoints_in(folder)[place::ranks]:
        state = saved.state
        if state is not None:
            position, history = state
            boxes = tuple(box for box in saved.file.boxes if travels(box))
            sources.append(
                _Source(
                    RecoveryOffer(Claim(history, position, is_live=False, past=SavedSyncState.of(boxes)), boxes),
                    {},
                    saved,
                )
            )
    return sources


def _steps_known(said: Sequence[SurvivorFacts | Claim], history: History) -> list[int]:
    """Return the steps that any rank knows the run to have made."""
    return [x.position.step for x in said if history.admits(x.history.world, x.position.step)]


def _from_disk(
    disk: Checkpointer, state: TrainState, group: dist.ProcessGroup | None
) -> tuple[Literal["disk", "none"], ArgosyError | None]:
    """Restore the newest checkpoint. Returns whether there was one, or why that failed on a rank: only one that reads
    it may find out.
    """
    tier: Literal["disk", "none"] = "none"
    mine: ArgosyError | None = None
    try:
        tier = "none" if disk.restore(state) is None else "disk"
    except ArgosyError as error:
        mine = error
    known = [] if mine is None else [ErrorRecord.of(mine)]
    problem = next((record.error() for record in over(group, peers_of(group).union(known, ErrorRecord))), None)
    assert problem is None or isinstance(problem, ArgosyError)
    return ("none" if problem else tier), problem


def _take(
    found: WholeState,
    sources: Sequence[_Source],
    state: TrainState,
    survivor: TrainState | None,
    group: dist.ProcessGroup | None,
) -> Traffic:
    """Carry out the transfers of `found`, and take the state over. Raises: CorruptMessage, RuntimeError."""
    is_used = any(sources[i].saved is None for i in found.used)
    adopted = state.adopt(survivor) if survivor is not None and is_used else set()
    tensors = state.boxes(found.past, adopted)
    held = TensorsToSave(*(sources[i].tensors() for i in reversed(found.used)))
    mine = peers_of(group).rank
    transfers = [t for t in found.transfers if t.receiver != mine or t.wanted in tensors]
    adopted_bytes = sum(box_bytes(t.part) for t in found.transfers) - sum(box_bytes(t.part) for t in transfers)
    for attempt in range(EXCHANGE_ATTEMPTS):
        try:
            traffic = carry(transfers, held, tensors, group)
            break
        except CorruptMessage:
            if attempt == EXCHANGE_ATTEMPTS - 1:
                raise
    _take_scale(found.leader, held, tensors, group)
    state.restored(tensors, adopted)
    state.step, state.tokens, state.skipped = found.position.step, found.position.tokens, found.position.skipped
    state.rounds, state.base_sha256 = found.position.rounds, found.position.base_sha256
    return replace(traffic, own_bytes=traffic.own_bytes + adopted_bytes)


def _take_scale(
    leader: int, held: Mapping[Box, Tensor], tensors: Mapping[Box, Tensor], group: dist.ProcessGroup | None
) -> None:
    """Take over the leader's loss scale, as far as there is one; states of other precisions have none.

    Of an in-memory checkpoint one rank has each part, as all had the same: the leader may lack it.
    """
    peers = peers_of(group)
    place = -1 if peers.rank == leader else peers.rank
    mine = {box.name: (place, held[box]) for box in held if is_scale(box)}
    scale = over(group, peers.merge(mine, dict[str, tuple[int, SentTensor]], _first))
    for box, tensor in tensors.items():
        if is_scale(box) and box.name in scale:
            tensor.copy_(scale[box.name][1])


def _first(one: dict[str, tuple[int, Tensor]], other: dict[str, tuple[int, Tensor]]) -> dict[str, tuple[int, Tensor]]:
    """Return each entry of the two with the lower number."""
    return one | {name: entry for name, entry in other.items() if name not in one or entry[0] < one[name][0]}


def _sum(one: Traffic, other: Traffic) -> Traffic:
    return Traffic(
        one.sent_bytes + other.sent_bytes, one.received_bytes + other.received_bytes, one.own_bytes + other.own_bytes
    )
