"""The exchange's process, as the process that starts it has it."""

from __future__ import annotations

from pathlib import Path

from argosy.config.schema import RunConfig
from argosy.observe.events import Events
from argosy.observe.terminal import print_message
from argosy.plan.plan import is_asynchronous
from argosy.processes.child import Child
from argosy.processes.supervisor import ChildEnd, RestartPolicy, Supervisor

EXCHANGE = "argosy.sync.main"
SPARE_S = 5.0
"""Time that it may take to end, beside that in which the other sites take what they need of the run."""


def exchange_of(folder: Path, run: RunConfig, events: Events) -> Supervisor | None:
    """Return the supervisor of the site's exchange; None for a run without sites.

    events: those of the process that starts it.
    """

    def ended(end: ChildEnd) -> None:
        events.write("exchange_died", why=end.why)
        then = "" if end.again_s is None else "; it is started again"
        print_message(f"argosy: the process that speaks to the other sites died: {end.why}{then}")

    if not run.sites or is_asynchronous(run.plan):
        return None
    policy = RestartPolicy(pause_s=2.0, finish_s=run.sync.patience_s + SPARE_S)
    return Supervisor(policy, lambda: Child(EXCHANGE, str(folder)), ended, is_wanted=False)
