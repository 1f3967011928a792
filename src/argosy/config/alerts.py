"""The run file's table `observe.alerts`: what is told to people while a run goes on, and how it reaches them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from argosy.config.section import Section

AlertKind = Literal[
    "spike", "nan", "stall", "dead", "disk_filling", "node_in_doubt", "low_goodput", "checkpoint_unverified"
]
ALL: tuple[AlertKind, ...] = (
    "spike", "nan", "stall", "dead", "disk_filling", "node_in_doubt", "low_goodput", "checkpoint_unverified",
)  # fmt: skip
VARIABLE = r"^$|^[A-Za-z_][A-Za-z0-9_]*$"


class AlertsConfig(Section):
    """What is told to people while a run goes on, and how it reaches them."""

    on: tuple[AlertKind, ...] = ALL
    """The alerts that are told: spike, nan, stall, dead, disk_filling, node_in_doubt, low_goodput,
    checkpoint_unverified."""
    page: bool = False
    """Write alerts into the run's events even if neither `webhook` nor `command` is given, so that the page shows those
    that came and went while nobody looked."""
    webhook: Annotated[str, Field(pattern=r"^$|^https?://[^\s/]+")] = ""
    """URL that each alert is posted to, as JSON. A URL with a secret in it belongs in `webhook_env`."""
    webhook_env: Annotated[str, Field(pattern=VARIABLE)] = ""
    """Environment variable that holds the URL, in place of `webhook`."""
    headers_env: Annotated[str, Field(pattern=VARIABLE)] = ""
    """Environment variable that holds headers of the request, one a line: Authorization: Bearer ..."""
    command: tuple[str, ...] = ()
    """Program with its arguments that each alert is given to, as JSON on its standard input; no shell is involved."""
    timeout_s: PositiveFloat = 10.0
    """Longest time that a request or the command may take."""
    stall_s: PositiveFloat = 60.0
    """stall: least time without a step. It is also twenty usual steps, and three times the longest of the last ones."""
    spike_steps: PositiveInt = 64
    """spike, nan: the alert ends after this many good steps."""
    disk_hours: NonNegativeFloat = 2.0
    """disk_filling: at the rate of the last lines the disk is full within this time; 0 looks at free space alone."""
    disk_free_gb: NonNegativeFloat = 5.0
    """disk_filling: less than this is free, in GB."""
    goodput: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """low_goodput: a smaller share of the last `goodput_minutes` went into steps that count."""
    goodput_minutes: PositiveFloat = 30.0
    """Window of low_goodput; in a younger run it is not looked at."""
    unverified_minutes: NonNegativeFloat = 0.0
    """checkpoint_unverified: no checkpoint was read back and found whole for so long; 0: three times the interval
    between checkpoints, at least 30 minutes."""
    goes_on_minutes: PositiveFloat = 60.0
    """An alert that lasts so long is told once more."""

    @property
    def are_delivered(self) -> bool:
        """True if somebody is to be told, or the events."""
        return self.page or bool(self.webhook or self.webhook_env or self.command)
