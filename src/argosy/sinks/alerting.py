"""Alerts reach people: by webhook, by a command, and as events of the run, so that the page shows them.

A sink like others: it lives in a process of its own that looks at the run's folder. What is delivered waits in a
bounded queue for a thread that may be slow, fail or hang; nothing waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from argosy.config.observe import AlertsConfig
from argosy.observe.events import Events
from argosy.sinks.delivery import SinkDelivery
from argosy.sinks.sink import About, Record, Sink
from argosy.watch.alerts import Alert, Alerts
from argosy.watch.gather import facts_of
from argosy.watch.reader import RunReader

LOOK_S = 2.0
"""How often the run is looked at."""
PROCESS = "alerts"
"""Name of its file of events."""


class Alerting(Sink):
    """Looks for alerts, writes them down, and has them delivered."""

    def __init__(self, about: About):
        """Raises: UserError if an environment variable that the settings name is not set."""
        super().__init__(about)
        settings = AlertsConfig.model_validate(about.config["observe"]["alerts"])
        self._events = Events(about.folder, PROCESS)
        self._reader = RunReader(about.folder)
        self._alerts = Alerts(settings, self.state.setdefault("said", {}))
        self._delivery = SinkDelivery(settings, lambda why: self._events.write("alert_undelivered", why=why))
        self._look_s = 0.0

    def tick(self) -> None:
        """Look at the run, if it is time to."""
        now_s = time.monotonic()
        if now_s - self._look_s >= LOOK_S:
            self._look_s = now_s
            self._tell(self._look())

    def close(self, report: Record | None) -> None:
        """Look once more, and wait a little until all is delivered."""
        self._tell(self._look())
        self._delivery.close()

    def _look(self) -> list[Alert]:
        self._reader.refresh()
        return self._alerts.look(facts_of(self._reader))

    def _tell(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            record = alert.record()
            facts = {name: value for name, value in record.items() if name != "time_s"}
            self._events.write("alert", **facts)
            self._delivery.put(record)
