"""Orders that the coordinator gives to agents."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Start:
    """Start a worker in a slot."""

    node: str
    slot: int


@dataclass(frozen=True)
class Join:
    """Form a world: the agent of rank 0 opens a rendezvous store, then each member is told its place."""

    generation: int
    plan: str
    places: dict[tuple[str, int], int]
    """(node, slot) -> rank."""


@dataclass(frozen=True)
class Break:
    """The generation is over: its members leave its world and wait."""

    generation: int
    why: str


@dataclass(frozen=True)
class FinishRun:
    """End the run."""

    exit_code: int
    why: str
    error: str = ""
    """Class of the error that the user sees; empty if no worker raised it."""


@dataclass(frozen=True)
class CheckNode:
    """Run a node health check; the agent reports when it is done."""

    node: str


Order = Start | Join | Break | FinishRun | CheckNode
