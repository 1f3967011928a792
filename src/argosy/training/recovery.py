"""Recovery: all ranks of a new world agree on the newest state that there is all of, and take it from who has it.

In this order, which is that of age: what survivors of the last world still hold (no step is lost), copies in host
memory (`memory`), the newest whole checkpoint on disk. A survivor whose update was under way offers nothing; one that
has its whole gradient, where another has applied it already, applies it now: from the same numbers, so to the same
bits.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol

import torch.distributed as dist
from torch import Tensor

from argosy.checkpoint.boxes import Box, Misfit
from argosy.checkpoint.exchange import CorruptMessage, Traffic, Transfer, carry, gather, host_group, route, travels
from argosy.checkpoint.history import History, Position
from argosy.checkpoint.memory import MemoryCheckpoint, memory_checkpoints_in, node_name
from argosy.errors import ArgosyError
from argosy.faults import fault
from argosy.parallel.world import World

ATTEMPTS = 3
"""At an exchange in which a message is corrupt: its sender still has what it was to be."""

Tier = Literal["live", "memory", "disk", "none"]


class Decided(Protocol):
    """What all ranks knew of a step that was applied (`training.state.Decision`)."""

    @property
    def step(self) -> int:
        """0-based."""


class Recoverable(Protocol):
    """A rank's state (`training.state.TrainState`)."""

    step: int
    tokens: int
    skipped: tuple[tuple[int, int], ...]
    history: History
    pending: bool
    in_update: bool

    @property
    def decided(self) -> Any:
        """A `Decided`, or None."""

    @property
    def can_follow(self) -> bool:
        """Whether `apply` needs no other rank."""

    def apply(self, decision: Any) -> None:
        """Make the update of a step whose gradient is pending."""

    def boxes(self) -> dict[Box, Tensor]:
        """Its tensors, to be read or to be filled."""

    def restored(self, boxes: Mapping[Box, Tensor]) -> None:
        """Take over what was filled."""


class Disk(Protocol):
    """The durable tier (`training.checkpointer.Checkpointer`); all ranks call it alike, and get the same."""

    def newest_step(self) -> int | None:
        """Of the newest checkpoint, which may turn out to be damaged."""

    def restore(self, state: Any) -> object | None:
        """Take `state` back from the newest that is whole; None if there is none. Raises: ArgosyError."""


@dataclass(frozen=True)
class Recovery:
    """What a world starts from; the same on all ranks."""

    tier: Tier
    """none: there was nothing; the state is as it was."""
    step: int
    steps_lost: int
    """Known to have been made, by a survivor, a copy or a checkpoint, and to be made again. If none of those who made
    them lives, metrics.jsonl may tell of more."""
    sent_bytes: int
    """From rank to rank, in all."""
    own_bytes: int
    """That ranks found in their own memory, in all."""
    seconds: float
    refused: tuple[str, ...] = ()
    """Copies in memory that were not what was written, and why the newest checkpoint could not be used."""
    decided: Any = None
    """The `Decision` of the last step, if a survivor knows it: who was to write that step's metrics may be gone."""


@dataclass(frozen=True)
class Facts:
    """What a process says of its state; one that has none, only its node."""

    node: str
    history: History = field(default_factory=History)
    position: Position | None = None
    decided: Decided | None = None

    @classmethod
    def of(cls, survivor: Recoverable | None) -> Facts:
        """Those of this process."""
        if survivor is None:
            return cls(node_name())
        position = Position(survivor.step, survivor.tokens, survivor.skipped)
        return cls(node_name(), survivor.history, position, survivor.decided)


@dataclass(frozen=True)
class Offer:
    """A state, or a part of one, that a rank can send."""

    history: History
    position: Position
    boxes: tuple[Box, ...]
    is_live: bool

    @property
    def moment(self) -> tuple[str, int]:
        """Offers of one moment fit together: the world that was in it, and its step."""
        return self.history.world, self.position.step


@dataclass(frozen=True)
class Recovered:
    """A state that there is all of."""

    history: History
    position: Position
    is_live: bool
    """Whether survivors have all of it; else some comes from copies."""
    used: tuple[tuple[int, ...], ...]
    """By rank, which of its offers; it has live ones first."""
    transfers: tuple[Transfer, ...]


def recover(
    state: Recoverable, survivor: Recoverable | None, disk: Disk, folder: Path | None, world: World
) -> Recovery:
    """Fill `state`, which is laid out for `world`, with the newest state that there is. All ranks call it together.

    `survivor`: what this process holds of the world that it comes from, if it was in one; it may be taken forward by
    one step. `folder`: of the copies in this node's memory. Afterwards the history of `state` has one world more.

    Raises: RuntimeError if a rank is gone; CorruptMessage if messages arrive damaged again and again; ArgosyError if
    there are checkpoints, and neither they nor anything else can be used. Until it returns the survivor is whole.
    """
    began = time.monotonic()
    group = host_group(world)
    facts = gather(Facts.of(survivor), group)
    follow(survivor, facts)
    sources = [*_live(survivor), *_copies(folder, facts, world.rank)]
    tensors = state.boxes()
    wanted = tuple(box for box in tensors if travels(box))
    said = gather((tuple(source.offer for source in sources), wanted, secrets.token_hex(6)), group)
    offers = [own for own, _, _ in said]
    history = max((at.history for at in [*facts, *chain(*offers)]), key=lambda h: (h.depth, h.world))
    found, refused = _newest_whole(offers, [wants for _, wants, _ in said], history, sources, group)

    fault("recover", rank=world.rank)
    tier: Tier = "none"
    traffic = [Traffic()]
    newest_on_disk = disk.newest_step() or 0
    if found is None or newest_on_disk > found.position.step:
        tier, problem = _from_disk(disk, state, group)
        if problem is not None:
            if found is None:
                raise problem
            refused.append(str(problem))
    if found is not None and (tier == "none" or state.step < found.position.step):
        tier = "live" if found.is_live else "memory"
        traffic = gather(_take(found, sources, state, tensors, group), group)
    past = state.history if tier == "disk" and state.history.depth > history.depth else history
    state.history = past.next(said[0][2], state.step)
    return Recovery(
        tier,
        state.step,
        max(newest_on_disk, state.step, *_steps_known(facts, offers, history)) - state.step,
        sum(t.received_bytes for t in traffic),
        sum(t.own_bytes for t in traffic),
        time.monotonic() - began,
        tuple(refused),
        next((f.decided for f in facts if f.decided is not None and f.decided.step == state.step - 1), None),
    )


def follow(survivor: Recoverable | None, facts: Sequence[Facts]) -> None:
    """Make the update that others have made already, if this survivor has all that it takes.

    None makes one before all have their gradients whole (`training.state.TrainState`), so others are ahead by one step
    at most; what they know of it is all that was missing here.
    """
    if survivor is None or not survivor.pending or not survivor.can_follow:
        return
    for ahead in facts:
        if ahead.history == survivor.history and ahead.decided is not None and ahead.decided.step == survivor.step:
            survivor.apply(ahead.decided)
            return


def newest_covered(
    offers: Sequence[Sequence[Offer]], wanted: Sequence[Sequence[Box]], history: History
) -> Recovered | None:
    """The newest state that is wholly offered, and who sends what to whom; by rank what is offered and wanted.

    `history`: where the run stands; states that it has turned away from do not count. It follows from the arguments
    alone, so that all ranks find the same.
    """
    moments = {offer.moment for own in offers for offer in own if history.admits(*offer.moment)}
    # Of one step the newer world's: an older one's may be from before the run went back.
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
                return Recovered(leader.history, leader.position, live_only, tuple(used), tuple(transfers))
    return None


def _matched(
    chosen: Sequence[Sequence[Offer]], wanted: Sequence[Sequence[Box]], leader: Offer
) -> tuple[list[list[Box]], list[list[Box]]]:
    """What ranks hold and want of one state; of the loss scale, which not all states have, one rank's counts for all:
    it may have changed, with no step made, where others did not come to hear of it.
    """
    held = [[box for offer in own for box in offer.boxes if offer is leader or not _is_scale(box)] for own in chosen]
    there = {box.name for own in held for box in own}
    return held, [[box for box in wants if box.name in there or not _is_scale(box)] for wants in wanted]


def _is_scale(box: Box) -> bool:
    return box.name.startswith("scaler.")


@dataclass(frozen=True)
class _Source:
    """Where this rank has something that it offers."""

    offer: Offer
    live: Mapping[Box, Tensor]
    copy: MemoryCheckpoint | None = None

    def is_whole(self) -> bool:
        return self.copy is None or self.copy.is_whole()

    def tensors(self) -> Mapping[Box, Tensor]:
        if self.copy is None:
            return self.live
        return {box: self.copy.file.read(box, box) for box in self.offer.boxes}

    @property
    def name(self) -> str:
        return f"{self.copy.path.name} of node {node_name()}" if self.copy else ""


def _live(survivor: Recoverable | None) -> list[_Source]:
    if survivor is None or survivor.in_update:
        return []
    tensors = {box: tensor for box, tensor in survivor.boxes().items() if travels(box)}
    position = Position(survivor.step, survivor.tokens, survivor.skipped)
    return [_Source(Offer(survivor.history, position, tuple(tensors), is_live=True), tensors)]


def _copies(folder: Path | None, facts: Sequence[Facts], rank: int) -> list[_Source]:
    """The copies in this node's memory that this rank speaks for: they are dealt out over the ranks of the node."""
    here = [other for other, fact in enumerate(facts) if fact.node == facts[rank].node]
    sources = []
    for copy in memory_checkpoints_in(folder)[here.index(rank) :: len(here)]:
        state = copy.state
        if state is not None:
            position, history = state
            boxes = tuple(box for box in copy.file.boxes if travels(box))
            sources.append(_Source(Offer(history, position, boxes, is_live=False), {}, copy))
    return sources


def _steps_known(facts: Sequence[Facts], offers: Sequence[Sequence[Offer]], history: History) -> list[int]:
    """Steps that the run has made, as far as anybody knows."""
    said: list[Facts | Offer] = [*facts, *chain(*offers)]
    known = [(at.history, at.position) for at in said if at.position is not None]
    return [position.step for past, position in known if history.admits(past.world, position.step)]


def _from_disk(
    disk: Disk, state: Recoverable, group: dist.ProcessGroup | None
) -> tuple[Literal["disk", "none"], ArgosyError | None]:
    """Whether there was a checkpoint to restore, or why that failed on a rank: it may only turn out in reading it."""
    tier: Literal["disk", "none"] = "none"
    mine: ArgosyError | None = None
    try:
        tier = "none" if disk.restore(state) is None else "disk"
    except ArgosyError as error:
        mine = error
    problem = next((error for error in gather(mine, group) if error is not None), None)
    return ("none" if problem else tier), problem


def _newest_whole(
    offers: Sequence[Sequence[Offer]],
    wanted: Sequence[Sequence[Box]],
    history: History,
    sources: Sequence[_Source],
    group: dist.ProcessGroup | None,
) -> tuple[Recovered | None, list[str]]:
    """`newest_covered` with copies that are what was written, and the names of those that are not."""
    rank = group.rank() if group else 0
    good = [list(own) for own in offers]
    refused: list[str] = []
    while (found := newest_covered(good, wanted, history)) is not None:
        mine = [i for i in found.used[rank] if not sources[i].is_whole()]
        bad = gather([(i, sources[i].name) for i in mine], group)
        if not any(bad):
            break
        for own, some in zip(good, bad, strict=True):
            for i, name in some:
                refused.append(name)
                own[i] = replace(own[i], boxes=())  # it keeps its place, and covers nothing
    return found, refused


def _take(
    found: Recovered,
    sources: Sequence[_Source],
    state: Recoverable,
    tensors: Mapping[Box, Tensor],
    group: dist.ProcessGroup | None,
) -> Traffic:
    """Carry out what was found, and take it over. Raises: CorruptMessage, RuntimeError."""
    rank = group.rank() if group else 0
    held: dict[Box, Tensor] = {}
    for i in reversed(found.used[rank]):
        held |= sources[i].tensors()
    for attempt in range(ATTEMPTS):
        try:
            traffic = carry(found.transfers, held, tensors, group)
            break
        except CorruptMessage:
            if attempt == ATTEMPTS - 1:
                raise
    state.restored(tensors)
    state.step, state.tokens, state.skipped = found.position.step, found.position.tokens, found.position.skipped
    return traffic
