"""What the coordinator has agents do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Start:
    """Start a worker in a slot."""

    node: str
    slot: int


@dataclass(frozen=True)
class Join:
    """Form a world: the agent of rank 0 opens a store, then each member is told its place."""

    generation: int
    plan: str
    places: dict[tuple[str, int], int]
    """(node, slot) -> rank."""


@dataclass(frozen=True)
class Break:
    """The generation is over: its members are to leave its world and wait."""

    generation: int
    why: str


@dataclass(frozen=True)
class Finish:
    """The run ends here."""

    exit_code: int
    why: str
    error: str = ""
    """Class of the error that the user is to see; empty if it is none of the workers' own."""


@dataclass(frozen=True)
class CheckNode:
    """Have a node examined; its agent tells when that is done."""

    node: str


Order = Start | Join | Break | Finish | CheckNode
