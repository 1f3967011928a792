"""What it costs replicas, or sites, to agree: the table `sync` of a step's line, if they do so in fewer bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from argosy.config.schema import RunConfig
from argosy.observe.counters import Communication
from argosy.plan.cost.traffic import traffic
from argosy.plan.plan import Plan
from argosy.plan.sync import OF_SITES
from argosy.plan.workload import parameters

OVER_REPLICAS = ("replicate", "expert_replicate")
"""Axes between replicas."""
FP32_BYTES = 4
FROM_SITES = {"staleness_steps": "staleness", "distance": "distance"}
"""Key of `sites` in a line -> the same in `sync`."""


class SyncAccount:
    """The account of one run under one plan."""

    def __init__(self, run: RunConfig, plan: Plan):
        self._sites = len(run.sites) if plan.sync in OF_SITES else 0
        self._is_kept = plan.is_compressed or bool(self._sites)
        self.exact_bytes = self._exact_bytes(run, plan)
        """What the first rank, or a site, would send in a step if gradients were summed exactly, in fp32."""

    def _exact_bytes(self, run: RunConfig, plan: Plan) -> float:
        if not self._is_kept:
            return 0.0
        if self._sites:  # a ring all-reduce over sites (Thakur et al. 2005)
            return 2 * (self._sites - 1) / self._sites * FP32_BYTES * parameters(run.model)
        exact = traffic(plan.model_copy(update={"sync": "exact", "reduce": "fp32"}), run)
        return float(sum(sent for (axis, _), sent in exact.items() if axis in OVER_REPLICAS))

    def line(self, communication: Communication, sites: Mapping[str, Any] | None) -> dict[str, float] | None:
        """Return the table of a step's line; None if nothing was exchanged, or all of it exactly.

        communication: the step's, as the clock gives it. sites: what the line says of the outer step after it.
        """
        if not self._is_kept:
            return None
        if self._sites:
            return None if sites is None else self._of_sites(sites)
        channels = [both for axis in OVER_REPLICAS for both in communication.get(axis, {}).values()]
        waited_s, sent = sum(both[0] for both in channels), sum(both[1] for both in channels)
        return self._table(sent, waited_s, steps=1) if channels else None

    def _of_sites(self, sites: Mapping[str, Any]) -> dict[str, float]:
        steps = max(1, int(sites.get("steps", sites.get("staleness_steps", 1))))  # with fragments, these differ
        found = self._table(float(sites.get("sent_bytes", 0)), float(sites.get("seconds", 0.0)), steps)
        return found | {name: sites[key] for key, name in FROM_SITES.items() if key in sites}

    def _table(self, sent: float, waited_s: float, steps: int) -> dict[str, float]:
        ratio = {"ratio": round(sent / (steps * self.exact_bytes), 6)} if self.exact_bytes else {}
        return {"bytes": round(sent), "seconds": round(waited_s, 6), **ratio}
