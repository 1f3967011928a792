"""The follower's process, for the process of the run that starts it."""

from __future__ import annotations

from pathlib import Path

from argosy.config.schema import RunConfig
from argosy.observe.events import Events
from argosy.observe.terminal import print_message
from argosy.processes.child import Child
from argosy.processes.supervisor import ChildEnd, RestartPolicy, Supervisor
from argosy.sinks.table import parts_of

FOLLOWER = "argosy.sinks.follower"
SPARE_S = 5.0
"""Time that it may take to end, beside that of its sinks."""


def follower_of(folder: Path, run: RunConfig, events: Events) -> Supervisor | None:
    """Return the supervisor of the run's follower; None for a run without sinks.

    events: those of the process that starts it.
    """

    def ended(end: ChildEnd) -> None:
        is_again = end.again_s is not None
        events.write("follower_died", why=end.why, again=is_again)
        then = "it is started again" if is_again else "the run has no sinks any more"
        print_message(f"argosy: the process that holds the run's sinks died: {end.why}; {then}, and training goes on")

    if not parts_of(run):
        return None
    policy = RestartPolicy(most_failures=5, finish_s=run.observe.sink.flush_s + SPARE_S)
    return Supervisor(policy, lambda: Child(FOLLOWER, str(folder)), ended, is_wanted=False)
