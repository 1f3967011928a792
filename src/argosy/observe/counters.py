"""Counters of a rank from step to step: seconds by category, communication by axis and tier, bytes it wrote.

The counters only grow while the rank is in one world, so that a reader who comes now and then misses nothing: two
readings, one subtracted from the other, are what happened between them. In a heartbeat's page they are a fixed number
of words, however long the steps are and however many the window has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from argosy.plan.cost.traffic import ENDS, STAGE, WORLD
from argosy.plan.cost.traffic import WIRE_AXES as TRAFFIC_AXES

Category = Literal[
    "data", "forward", "backward", "pipeline", "communication", "optimizer", "check", "evaluate", "checkpoint", "user"
]
"""`communication` is the part that backward did not hide; `pipeline` is forward and backward where a schedule
interleaves them, waits included; `check` is the replay check, including the wait for the ranks that replay, and writing
a profile; `user` is code of the user's (docs/extending.md); `other` is the rest of the wall time."""
OWN_WORK: tuple[Category, ...] = ("data", "forward", "backward", "pipeline", "optimizer", "user")
"""A process's own work, apart from what it waits for other ranks meanwhile."""
CATEGORIES = (*get_args(Category), "other", "step")
"""The parts of a step as `observe.clock.StepClock` tells them apart; `step` is their sum, the wall time."""
OTHER = "other"
"""The axis of a group that is neither a mesh's nor the world."""
COUNTED_AXES = (*TRAFFIC_AXES, "dp_shard", "dp_replicate", WORLD, ENDS, STAGE, OTHER)
"""The axes of communication, as `observe.wire` names them."""
NODE_TIER, NETWORK_TIER = "node", "network"
NETWORK_TIERS = (NODE_TIER, NETWORK_TIER)
"""All ranks of the group are on one machine; or its messages cross machines."""

Communication = Mapping[str, Mapping[str, Sequence[float]]]
"""Axis -> tier -> seconds that the rank waited, bytes that it sent."""

STEPS_SLOT, FIRST_STEP_SLOT, LAST_STEP_SLOT, MEMORY_SLOT, WRITTEN_SLOT = range(5)
SECONDS_SLOT = 5
CHANNELS = SECONDS_SLOT + len(CATEGORIES)
_CHANNEL = {
    (axis, tier): CHANNELS + 2 * number
    for number, (axis, tier) in enumerate((axis, tier) for axis in COUNTED_AXES for tier in NETWORK_TIERS)
}
COUNTER_WORDS = CHANNELS + 2 * len(_CHANNEL)
"""Words of 8 bytes that the counters take: steps, the first and the last of them, memory, bytes written; nanoseconds of
each category; nanoseconds and bytes of each axis and tier."""


@dataclass(frozen=True)
class Counters:
    """Counts of a rank since it joined its world."""

    steps: int = 0
    first_step: int = -1
    """-1: it has not ended one."""
    last_step: int = -1
    memory_bytes: int = 0
    """The peak of its memory up to now; not a sum."""
    checkpoint_bytes: int = 0
    """Bytes of checkpoints that it has written."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    communication: Communication = field(default_factory=dict)

    def since(self, before: Counters) -> Counters:
        """Return what was counted after `before`, in the same world; the first step is the one after its last."""
        return Counters(
            steps=self.steps - before.steps,
            first_step=self.first_step if before.last_step < 0 else before.last_step + 1,
            last_step=self.last_step,
            memory_bytes=self.memory_bytes,
            checkpoint_bytes=self.checkpoint_bytes - before.checkpoint_bytes,
            seconds={name: s - before.seconds.get(name, 0.0) for name, s in self.seconds.items()},
            communication={
                axis: {
                    tier: [now - then for now, then in zip(both, _channel_of(before, axis, tier), strict=True)]
                    for tier, both in tiers.items()
                }
                for axis, tiers in self.communication.items()
            },
        )


def _channel_of(counters: Counters, axis: str, tier: str) -> Sequence[float]:
    return counters.communication.get(axis, {}).get(tier, (0.0, 0))


def clear(words: memoryview, at: int) -> None:
    for place in range(at, at + COUNTER_WORDS):
        words[place] = 0
    words[at + FIRST_STEP_SLOT] = words[at + LAST_STEP_SLOT] = -1


def add_step(
    words: memoryview, at: int, step: int, seconds: Mapping[str, float], communication: Communication, memory_bytes: int
) -> None:
    words[at + STEPS_SLOT] += 1
    words[at + LAST_STEP_SLOT] = step
    if words[at + FIRST_STEP_SLOT] < 0:
        words[at + FIRST_STEP_SLOT] = step
    words[at + MEMORY_SLOT] = memory_bytes
    for number, category in enumerate(CATEGORIES):
        if took_s := seconds.get(category):
            words[at + SECONDS_SLOT + number] += round(took_s * 1e9)
    for axis, tiers in communication.items():
        for tier, (waited_s, sent_bytes) in tiers.items():
            channel = at + _CHANNEL[axis, tier]
            words[channel] += round(waited_s * 1e9)
            words[channel + 1] += round(sent_bytes)


def read(words: Sequence[int], at: int) -> Counters:
    """Return what the words from `at` on say; categories and axes that were never met are left out."""
    communication: dict[str, dict[str, Sequence[float]]] = {}
    for (axis, tier), place in _CHANNEL.items():
        waited_ns, sent_bytes = words[at + place : at + place + 2]
        if waited_ns or sent_bytes:
            communication.setdefault(axis, {})[tier] = (waited_ns / 1e9, sent_bytes)
    return Counters(
        steps=words[at + STEPS_SLOT],
        first_step=words[at + FIRST_STEP_SLOT],
        last_step=words[at + LAST_STEP_SLOT],
        memory_bytes=words[at + MEMORY_SLOT],
        checkpoint_bytes=words[at + WRITTEN_SLOT],
        seconds={
            category: words[at + SECONDS_SLOT + number] / 1e9
            for number, category in enumerate(CATEGORIES)
            if words[at + SECONDS_SLOT + number]
        },
        communication=communication,
    )
