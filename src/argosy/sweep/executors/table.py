"""The places where trials run, by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from argosy.sweep.executor import Executor
from argosy.sweep.load import Sweep
from argosy.sweep.needs import Limits

Place = Literal["local"]


@dataclass(frozen=True)
class Asked:
    """What the command line asks of a cluster for each trial."""

    gpus: int = 0
    time: str = ""
    account: str = ""
    partition: str = ""
    extra: tuple[str, ...] = ()


def executor_on(place: Place, sweep: Sweep, folder: Path, limits: Limits, asked: Asked) -> Executor:
    """Return the place of that name. Raises: UserError if it is not there."""
    from argosy.sweep.executors.local import LocalTrials

    return LocalTrials(limits)
