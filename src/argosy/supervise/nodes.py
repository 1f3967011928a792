"""What is known of nodes and of the worker processes on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class State(Enum):
    """What a worker process is doing, as its agent and it tell it."""

    STARTING = "starting"
    """It imports what it needs."""
    READY = "ready"
    """It waits for a world."""
    RUNNING = "running"
    """It was told to join the generation's world."""
    DONE = "done"
    """Its run is at its end."""


@dataclass
class Worker:
    """A process that can have a rank."""

    state: State = State.STARTING
    rank: int | None = None
    """That it has, or had in the world that it comes from."""
    generation: int = 0
    """Of that world; 0 for a process that has been in none."""
    pid: int = 0


@dataclass
class Node:
    """An agent and its workers, by slot."""

    host: str
    slots: int
    """How many workers the node has room for, those that nobody needs at the moment included."""
    workers: dict[int, Worker] = field(default_factory=dict)
    is_avoided: bool = False
    """It is taken only if there are not processes enough without it."""
    is_last: bool = False
    """It is slow, or was in doubt too often: where more are ready than a world needs, the others are taken first."""
    is_being_checked: bool = False
    """Its workers wait for what an examination finds."""


@dataclass(frozen=True)
class Cause:
    """Why a worker was lost."""

    why: str
    error: str = ""
    """Class of the error that the worker recorded, if it could."""
    exit_code: int = 0
    """Negative: a signal. From FINAL on: an error that a restart would only meet again."""
    step: int = -1
    """The step it was in, if known."""

    @property
    def is_own(self) -> bool:
        """Whether the worker itself went wrong, rather than was killed from outside."""
        return self.exit_code not in (-9, -15)
