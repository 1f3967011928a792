"""What a run with sites has besides that of any run, opened: its sites, the samples of its own, the outer state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from argosy.config.schema import RunConfig
from argosy.data.loader import OpenData, open_data
from argosy.plan.plan import LOCAL, Plan
from argosy.sync.sites.deal import SiteOrder
from argosy.sync.sites.layout import Sites
from argosy.sync.sites.ledger import Ledger
from argosy.training.outer_state import OuterState
from argosy.training.state import TrainState


def outer_state(plan: Plan, state: TrainState, sites: Sites | None, ledger: Ledger) -> OuterState | None:
    """Return the outer state of a rank; None without sites."""
    if sites is None or plan.sync not in LOCAL:
        return None
    return OuterState(sites, ledger, state.model.masters, plan.sync == "diloco")


def sites_of(run: RunConfig, run_dir: Path) -> Sites | None:
    """Return the sites of the run whose folder here is `run_dir`; None if it has none."""
    return Sites.of(run, run_dir) if run.sites else None


def open_own_data(run: RunConfig, ledger: Ledger, sites: Sites | None) -> OpenData:
    """Open the data of a run; of a run with sites, with this site's samples only."""
    if sites is None:
        return open_data(run.data, run.seed, run.train.batches)
    data = open_data(run.data, run.seed, sites.shares.global_batch)
    ahead = sites.shares.ahead
    order = SiteOrder(data.order, sites.shares, sites.me, lambda number: ledger.dealt_by(number - ahead))
    return replace(data, order=order, batches=run.train.batches)
