"""Nodes and the worker processes on them, as the coordinator knows them."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import Enum


class RankState(Enum):
    """What a worker process is doing."""

    STARTING = "starting"
    """It imports what it needs."""
    READY = "ready"
    """It waits for a world."""
    RUNNING = "running"
    """It was told to join the generation's world."""
    DONE = "done"
    """It has reached the end of the run."""


@dataclass
class RankProcess:
    """A process that can have a rank."""

    state: RankState = RankState.STARTING
    rank: int | None = None
    """Its rank in its world, or in the last world it was in."""
    generation: int = 0
    """The generation of that world; 0 if it has been in none."""
    pid: int = 0


@dataclass
class Node:
    """An agent and its workers, by slot."""

    host: str
    slots: int
    """How many workers the node has room for, spare ones included."""
    workers: dict[int, RankProcess] = field(default_factory=dict)
    is_avoided: bool = False
    """True if it is used only when there are not enough processes without it."""
    is_last: bool = False
    """True if it is slow, or was suspected too often: where more are ready than needed, the others come first."""
    is_being_checked: bool = False
    """True while its workers wait for a node health check."""


@dataclass(frozen=True)
class Cause:
    """Why a worker was lost."""

    why: str
    error: str = ""
    """Class of the error that the worker reported, if it could."""
    exit_code: int = 0
    """Negative: a signal. From FINAL on: an error that a restart would only meet again."""
    step: int = -1
    """The step it was in, if known."""

    @property
    def is_own(self) -> bool:
        """True if the worker itself failed, rather than was killed from outside."""
        return self.exit_code not in (-signal.SIGKILL, -signal.SIGTERM)
