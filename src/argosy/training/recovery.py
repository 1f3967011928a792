"""Recovery: the ranks of a new world agree on the newest state of which every part is there, and take it over.

They look in this order, which is that of age: what survivors of the last world still hold (no step is lost), in-memory
checkpoints, the newest whole checkpoint on disk. A survivor whose update was under way offers nothing; one that has its
whole gradient, where another rank has applied it already, applies it now: from the same numbers, so to the same bits.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from argosy.checkpoint.boxes import Box
from argosy.checkpoint.exchange import CorruptMessage, Traffic, carry, gather, host_group, travels
from argosy.checkpoint.history import History, Position
from argosy.checkpoint.memory import MemoryCheckpoint, memory_checkpoints_in, node_name
from argosy.errors import ArgosyError
from argosy.faults import fault
from argosy.parallel.world import World
from argosy.training.checkpointer import Checkpointer
from argosy.training.offers import Offer, WholeState, newest_whole_state
from argosy.training.state import TrainState, Update

ATTEMPTS = 3
"""Tries of an exchange in which a message is corrupt: its sender still has what it was to be."""

Tier = Literal["live", "memory", "disk", "none"]


@dataclass(frozen=True)
class Recovery:
    """What a world starts from; the same on all ranks."""

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
    last_update: Update | None = None
    """That of the last step, if a survivor knows it: the rank that was to write that step's metrics may be gone."""


@dataclass(frozen=True)
class Facts:
    """What a process says of its state; without one, it says only its node."""

    node: str
    history: History = field(default_factory=History)
    position: Position | None = None
    last_update: Update | None = None

    @classmethod
    def of(cls, survivor: TrainState | None) -> Facts:
        """Return the facts of this process."""
        if survivor is None:
            return cls(node_name())
        return cls(node_name(), survivor.history, survivor.position, survivor.last_update)


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
    group = host_group(world)
    facts = gather(Facts.of(survivor), group)
    follow(survivor, facts)
    sources = [*_live(survivor), *_in_memory(folder, facts, world.rank)]
    tensors = state.boxes()
    wanted = tuple(box for box in tensors if travels(box))
    said = gather((tuple(source.offer for source in sources), wanted, secrets.token_hex(6)), group)
    offers = [own for own, _, _ in said]
    history = max((at.history for at in [*facts, *chain(*offers)]), key=lambda h: (h.depth, h.world))
    found, refused = _newest_undamaged(offers, [wants for _, wants, _ in said], history, sources, group)

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
        next((u for u in (f.last_update for f in facts) if u is not None and u.step == state.step - 1), None),
    )


def follow(survivor: TrainState | None, facts: Sequence[Facts]) -> None:
    """Make the update that other ranks have made already, if this survivor has all that it takes.

    No rank makes one before all have their gradients whole (`TrainState`), so others are ahead by one step at most;
    what they know of it is all that was missing here.
    """
    if survivor is None or not survivor.pending or not survivor.can_follow:
        return
    for ahead in facts:
        update = ahead.last_update
        if ahead.history == survivor.history and update is not None and update.step == survivor.step:
            survivor.apply(update)
            return


@dataclass(frozen=True)
class _Source:
    """Where this rank has something that it offers."""

    offer: Offer
    live: Mapping[Box, Tensor]
    saved: MemoryCheckpoint | None = None

    def is_whole(self) -> bool:
        return self.saved is None or self.saved.is_whole()

    def tensors(self) -> Mapping[Box, Tensor]:
        if self.saved is None:
            return self.live
        return {box: self.saved.file.read(box, box) for box in self.offer.boxes}

    @property
    def name(self) -> str:
        return f"{self.saved.path.name} of node {node_name()}" if self.saved else ""


def _live(survivor: TrainState | None) -> list[_Source]:
    if survivor is None or survivor.in_update:
        return []
    tensors = {box: tensor for box, tensor in survivor.boxes().items() if travels(box)}
    return [_Source(Offer(survivor.history, survivor.position, tuple(tensors), is_live=True), tensors)]


def _in_memory(folder: Path | None, facts: Sequence[Facts], rank: int) -> list[_Source]:
    """Return this rank's part of the in-memory checkpoints of its node: they are dealt out over the node's ranks."""
    here = [other for other, fact in enumerate(facts) if fact.node == facts[rank].node]
    sources = []
    for saved in memory_checkpoints_in(folder)[here.index(rank) :: len(here)]:
        state = saved.state
        if state is not None:
            position, history = state
            boxes = tuple(box for box in saved.file.boxes if travels(box))
            sources.append(_Source(Offer(history, position, boxes, is_live=False), {}, saved))
    return sources


def _steps_known(facts: Sequence[Facts], offers: Sequence[Sequence[Offer]], history: History) -> list[int]:
    """Return the steps that any rank knows the run to have made."""
    said: list[Facts | Offer] = [*facts, *chain(*offers)]
    known = [(at.history, at.position) for at in said if at.position is not None]
    return [position.step for past, position in known if history.admits(past.world, position.step)]


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
    problem = next((error for error in gather(mine, group) if error is not None), None)
    return ("none" if problem else tier), problem


def _newest_undamaged(
    offers: Sequence[Sequence[Offer]],
    wanted: Sequence[Sequence[Box]],
    history: History,
    sources: Sequence[_Source],
    group: dist.ProcessGroup | None,
) -> tuple[WholeState | None, list[str]]:
    """Return the newest whole state without damaged in-memory checkpoints, and the names of the damaged ones."""
    rank = group.rank() if group else 0
    good = [list(own) for own in offers]
    refused: list[str] = []
    while (found := newest_whole_state(good, wanted, history)) is not None:
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
    found: WholeState,
    sources: Sequence[_Source],
    state: TrainState,
    tensors: Mapping[Box, Tensor],
    group: dist.ProcessGroup | None,
) -> Traffic:
    """Carry out the transfers of `found`, and take the state over. Raises: CorruptMessage, RuntimeError."""
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
