"""The ways in which sites that a thin link joins can agree, as plans that run: in every step, or every H steps."""

from __future__ import annotations

from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.sites import ExchangeCost, exchange_bytes, outer_exchanges, within_site
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.search.best import best_to_run
from argosy.plan.search.space import Pins
from argosy.plan.sync import OF_SITES


def ways_to_agree(run: RunConfig, cluster: Cluster, pins: Pins) -> tuple[ExchangeCost, ...]:
    """Return a row for sums in every step and some for rounds, each with its plan; none if no link joins sites.

    Rounds need a batch that sites can share. A row that no plan with these pins can make is left out.
    """
    if not cluster.links:
        return ()
    pins = {key: values for key, values in pins.items() if key != "sync" or not set(OF_SITES) & set(values)}
    alone = run.model_copy(update={"sites": (), "site": ""})
    whole = CostModel.of(alone, cluster)
    ways: list[ExchangeCost] = []
    if (found := best_to_run(whole, pins)) is not None:
        ways.append(ExchangeCost(1, exchange_bytes(whole, cluster), found[1], str(found[0]), {}))
    try:
        of_site = within_site(whole, cluster)
    except UserError:  # the batch cannot be shared
        return tuple(ways)
    inside = {key: values for key, values in pins.items() if key not in ("sync", "sum_inside", "sum_between")}
    if (found := best_to_run(of_site, inside)) is not None:
        ways += outer_exchanges(of_site, cluster, *found)
    return tuple(ways)
