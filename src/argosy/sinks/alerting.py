"""Alerts reach people: by webhook, by a command, and as events of the run, so that the page shows them.

A sink like others: it lives in a process of its own that looks at the run's folder. What is delivered waits in a
bounded queue for a thread that may be slow, fail or hang; nothing waits for it.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from argosy.config.observe import AlertsConfig
from argosy.errors import UserError
from argosy.observe.events import Events
from argosy.sinks.sink import About, Record, Sink
from argosy.watch.alerts import Alert, Alerts
from argosy.watch.conclusions import KNOWN, facts_of
from argosy.watch.reader import RunReader

MOST_WAITING_ALERTS = 64
"""Alerts that wait at most; of more, the oldest are dropped."""
DELIVERY_TRIES = 4
ALERT_PAUSES_S = (1.0, 5.0, 20.0)
"""Times that a request is made, and the pauses in between. A command is run once: it may have done half its work."""
CLOSE_S = 20.0
"""Most seconds that the end of a run waits for deliveries."""
OK = 300
"""Statuses below this mean that a request was taken."""


class SinkDelivery:
    """Delivers records one after the other; `put` never waits."""

    def __init__(self, settings: AlertsConfig, failed: Callable[[str], None]):
        """`failed` is told in a sentence what could not be delivered.

        Raises: UserError if an environment variable is not set, or does not hold a URL.
        """
        self._settings, self._failed = settings, failed
        self._url = _url(settings)
        self._headers = _headers(settings)
        self._queue: queue.Queue[Mapping[str, Any] | None] = queue.Queue(MOST_WAITING_ALERTS)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._deliver_all, name="argosy-alerts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until all is delivered, `CLOSE_S` at most."""
        self._is_closing.set()
        self.put(None)
        self._thread.join(min(CLOSE_S, (DELIVERY_TRIES + 1) * self._settings.timeout_s))

    def put(self, record: Mapping[str, Any] | None) -> None:
        """Have a record delivered; None: it was the last one."""
        while True:
            try:
                self._queue.put_nowait(record)
                return
            except queue.Full:
                with suppress(queue.Empty):
                    dropped = self._queue.get_nowait()
                    self._failed(
                        f"{(dropped or {}).get('alert')} was dropped: {MOST_WAITING_ALERTS} others wait for delivery"
                    )

    def _deliver_all(self) -> None:
        while (record := self._queue.get()) is not None:
            text = json.dumps(record).encode()
            if self._url:
                self._post(record, text)
            if self._settings.command:
                self._run(record, text)

    def _post(self, record: Mapping[str, Any], text: bytes) -> None:
        why = ""
        for number in range(DELIVERY_TRIES):
            try:
                why = post(self._url, text, self._headers, self._settings.timeout_s)
            except (OSError, http.client.HTTPException, ValueError) as problem:
                why = f"{type(problem).__name__}: {problem}"
            if not why:
                return
            if number < len(ALERT_PAUSES_S):
                self._is_closing.wait(ALERT_PAUSES_S[number])  # the end of a run does not wait for a server to recover
        host = urlsplit(self._url).hostname  # the rest of the URL may be secret
        self._failed(f"{record.get('alert')} {record.get('state')}: webhook on {host} failed: {why}")

    def _run(self, record: Mapping[str, Any], text: bytes) -> None:
        try:
            why = run(self._settings.command, text, self._settings.timeout_s)
        except (OSError, ValueError) as problem:
            why = str(problem)
        if why:
            said = f"{record.get('alert')} {record.get('state')}"
            self._failed(f"{said}: command {self._settings.command[0]} failed: {why}")


def post(url: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> str:
    """Post JSON and return why it was not taken; empty if it was. All of it takes at most about `timeout_s`.

    Redirects are not followed: a secret must go nowhere else. Raises: OSError, HTTPException, ValueError.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    # A timeout of the connection is that of each read: a server that sends a byte now and then would hold it for ever.
    guard = threading.Timer(timeout_s, lambda: _shut(connection))
    guard.daemon = True
    guard.start()
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return "" if response.status < OK else f"status {response.status} {response.reason}"
    finally:
        guard.cancel()
        connection.close()


def run(command: tuple[str, ...], text: bytes, timeout_s: float) -> str:
    """Run a command with `text` on its standard input; return why it failed, empty if it did not.

    It is a process group of its own, which is killed after `timeout_s`. Raises: OSError if it cannot be started.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    began_s = time.monotonic()
    try:
        _, said = process.communicate(text, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"it took longer than {timeout_s:g} s"
    finally:
        with suppress(ProcessLookupError, PermissionError):  # what it has started, too
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, timeout_s - (time.monotonic() - began_s)))
    words = said.decode(errors="replace").strip().splitlines()[-1:]
    return "" if process.returncode == 0 else f"exit code {process.returncode} {''.join(words)[:200]}".strip()


def _shut(connection: http.client.HTTPConnection) -> None:
    with suppress(OSError, AttributeError):
        connection.sock.shutdown(2)


def _url(settings: AlertsConfig) -> str:
    if not settings.webhook_env:
        return settings.webhook
    url = _variable("webhook_env", settings.webhook_env)
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise UserError(
            f"observe.alerts.webhook_env: {settings.webhook_env} does not hold a URL. Begin it with https://."
        )
    return url


def _headers(settings: AlertsConfig) -> dict[str, str]:
    if not settings.headers_env:
        return {}
    lines = [line for line in _variable("headers_env", settings.headers_env).splitlines() if line.strip()]
    pairs = [line.partition(":") for line in lines]
    if any(not colon or not name.strip() for name, colon, _ in pairs):
        raise UserError(
            f"observe.alerts.headers_env: {settings.headers_env} does not hold headers. Write NAME: VALUE, one a line."
        )
    return {name.strip(): value.strip() for name, _, value in pairs}


def _variable(key: str, name: str) -> str:
    value = os.environ.get(name, "").strip()
    if not value:
        raise UserError(
            f'observe.alerts.{key} = "{name}": this environment variable is not set. Set it, or leave it out.'
        )
    return value


CHECK_EVERY_S = 2.0
"""Seconds between two checks of the run."""
ALERTS_NAME = "alerts"
"""Name of its file of events."""


class Alerting(Sink):
    """Looks for alerts, writes them down, and has them delivered."""

    def __init__(self, about: About):
        """Raises: UserError if an environment variable that the settings name is not set."""
        super().__init__(about)
        settings = AlertsConfig.model_validate(about.config["observe"]["alerts"])
        self._events = Events(about.folder, ALERTS_NAME)
        self._reader = RunReader(about.folder)
        self._alerts = Alerts(settings, self.state.setdefault("said", {}))
        self._delivery = SinkDelivery(settings, lambda why: self._events.write("alert_undelivered", why=why))
        self._look_s = 0.0

    def tick(self) -> None:
        now_s = time.monotonic()
        if now_s - self._look_s >= CHECK_EVERY_S:
            self._look_s = now_s
            self._tell(self._look())

    def close(self, report: Record | None) -> None:
        self._tell(self._look())
        self._delivery.close()

    def _look(self) -> list[Alert]:
        self._reader.refresh()
        if len(self._reader.steps) > KNOWN:
            self._reader.release()  # of a long run no alert needs all numbers, and they grow for months
        return self._alerts.look(facts_of(self._reader))

    def _tell(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            record = alert.record()
            facts = {name: value for name, value in record.items() if name != "time_s"}
            self._events.write("alert", **facts)
            self._delivery.put(record)
