"""The process of a site's exchange: `python -m argosy.sync.process RUN_FOLDER`, a child of the site's agent, which
supervises it (`exchange_of`)."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from argosy.config.load import RUN_FILE, load
from argosy.config.schema import RunConfig
from argosy.errors import StorageError, UserError
from argosy.observe.events import Events
from argosy.observe.terminal import lasting_output, print_message
from argosy.plan.plan import is_asynchronous
from argosy.processes.child import Child, channel_to_parent, end_with_parent
from argosy.processes.supervisor import ChildEnd, RestartPolicy, Supervisor
from argosy.sync.exchange import SiteExchange
from argosy.sync.layout import Sites, group_folder
from argosy.sync.ledger import RoundLedger
from argosy.sync.links import open_links
from argosy.sync.messages import FROM_SITE

EXCHANGE = "argosy.sync.process"
EXCHANGE_SPARE_S = 5.0
"""Time that it may take to end, beside that in which the other sites take what they need of the run."""


def exchange_of(folder: Path, run: RunConfig, events: Events) -> Supervisor | None:
    """Return the supervisor of the site's exchange; None for a run without sites.

    events: those of the process that starts it. Its `keep` raises StorageError once the folder is gone.
    """

    def ended(end: ChildEnd) -> None:
        if not (folder / RUN_FILE).exists():
            raise StorageError(
                f"{folder} has lost its {RUN_FILE}. Start the site again: it takes another site's state."
            )
        events.write("exchange_died", why=end.why)
        then = "" if end.again_s is None else "; it is started again"
        print_message(f"argosy: the process that speaks to the other sites died: {end.why}{then}")

    if not run.sites or is_asynchronous(run.plan):
        return None
    policy = RestartPolicy(pause_s=2.0, finish_s=run.sync.patience_s + EXCHANGE_SPARE_S)
    return Supervisor(policy, lambda: Child(EXCHANGE, str(folder)), ended, is_wanted=False)


EXCHANGE_TURN_S = 0.02
"""Seconds between two looks for files of the ranks."""


def open_exchange(run: RunConfig, run_dir: Path) -> SiteExchange:
    """Return the exchange of the site whose run is in `run_dir`. Raises: UserError."""
    sites = Sites.of(run, run_dir)
    links = open_links(run, sites.me, group_folder(run_dir), FROM_SITE)
    return SiteExchange(
        sites,
        RoundLedger(run_dir),
        Events(run_dir, "exchange"),
        lambda exchange: links(exchange.hello, exchange.refused),
    )


@lasting_output()  # as the agent that holds it
def main() -> None:
    """Exchange changes with the other sites until the agent says that the run is over, or ends."""
    run_dir = Path(sys.argv[1])
    run, ending = load(run_dir / "run.toml"), threading.Event()
    channel = channel_to_parent()
    try:
        exchange = open_exchange(run, run_dir)
    except UserError as problem:  # the agent starts another one: the port may be free by then
        print(f"argosy: {problem}", flush=True)
        sys.exit(problem.exit_code)
    is_gone = threading.Event()
    end_with_parent(channel, ending, is_gone)
    while not ending.is_set():
        exchange.turn(EXCHANGE_TURN_S)
    until = time.monotonic() + run.sync.patience_s
    while exchange.rounds >= exchange.sites.rounds_due and not exchange.is_over and not is_gone.is_set():
        if time.monotonic() > until:
            break
        exchange.turn(EXCHANGE_TURN_S)
    exchange.close()


if __name__ == "__main__":
    main()
