"""What a sink is: a place that shows a run, and is told what the run has written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

Record = dict[str, Any]
"""A line of one of the run's files, as it was written."""


@dataclass(frozen=True)
class About:
    """What a sink learns of a run before anything else."""

    name: str
    """The run's name."""
    folder: Path
    """The run's folder."""
    config: dict[str, Any]
    """The resolved run file."""
    plan: dict[str, Any]
    """The plan's fields; `plan_text` is the same in one line."""
    plan_text: str
    state: dict[str, Any] = field(default_factory=dict)
    """What the sink has kept of itself when it last ran; empty at the first time."""


class Sink:
    """Base of all sinks: each method does nothing.

    A sink lives in a process of its own. It may raise, hang or die: then it is ended, the rest of the run goes on, and
    it is begun again later with `About.state` and the lines that it has not had. What it is told comes from the run's
    files, so that a line comes again only if the sink's process died while it was told.
    """

    can_rewind: ClassVar[bool] = True
    """False if what was told cannot be taken back. Then, in place of `rewind`, `start_over` is called, and all lines of
    the run come again."""

    must_start_over: bool = False
    """Set it in the constructor to be told everything again, as if steps had been lost."""

    def __init__(self, about: About):
        self.about = about
        self.state = about.state
        """What must be kept over a restart (JSON), such as the id that a server gave the run. It is saved after each
        call."""

    def steps(self, records: Sequence[Record]) -> None:
        """Take lines of steps, in order: "step", "loss", "seconds", ... (docs/metrics.md)."""

    def evaluations(self, records: Sequence[Record]) -> None:
        """Take lines of evaluations: "step", "validation_loss", "bits_per_byte"."""

    def events(self, records: Sequence[Record]) -> None:
        """Take events of the run's processes: "process", "time_s", "event", ... (docs/events.md)."""

    def samples(self, records: Sequence[Record]) -> None:
        """Take texts that the model wrote: "step", "time_s", "prompt", "text"."""

    def rewind(self, step: int) -> None:
        """Forget the values of `step` and later: these steps were lost, and are run again."""

    def start_over(self) -> None:
        """Drop all that was told: everything comes again from the run's first line."""

    def tick(self) -> None:
        """Do what is due; called about once a second, after the lines that were new."""

    def close(self, report: Record | None) -> None:
        """Write the rest: the run ends here. `report`: report.json; None if the run did not write one."""
