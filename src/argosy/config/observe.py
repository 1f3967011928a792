"""The run file's table `observe`: what a run shows of itself, and where."""

from __future__ import annotations

from pydantic import PositiveFloat

from argosy.config.alerts import AlertsConfig
from argosy.config.section import Section


class ObserveConfig(Section):
    """What a run shows of itself, and where. Nothing here changes what is trained."""

    ranks_every_s: PositiveFloat = 5.0
    """Seconds between two lines in which a node writes down what its ranks and devices did; longer in large runs."""
    alerts: AlertsConfig = AlertsConfig()
