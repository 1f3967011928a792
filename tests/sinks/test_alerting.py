"""The sink that looks for alerts: it writes them down once and has them delivered, over its own restarts too."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from argosy.config.load import load
from argosy.config.observe import AlertsConfig
from argosy.errors import UserError
from argosy.observe.events import read_lines
from argosy.sinks import alerting
from argosy.sinks.alerting import MOST_WAITING_ALERTS, Alerting, SinkDelivery
from argosy.sinks.sink import About
from argosy.watch.metrics_table import FIRST_KEYS
from waiting import wait_until

ALERT = {"alert": "stall", "state": "begins", "why": "no step has ended for 90 s"}


class Webhook(ThreadingHTTPServer):
    """A server that answers as `behave` says, and keeps what it was sent."""

    daemon_threads = True

    def __init__(self, behave: Callable[[int], Any] = lambda number: 200):
        super().__init__(("127.0.0.1", 0), Handler)
        self.behave, self.got, self.headers = behave, [], []  # type: ignore[var-annotated]
        self.url = f"http://127.0.0.1:{self.server_port}/hook"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        self.server.headers.append(dict(self.headers))
        self.server.got.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
        answer = self.server.behave(len(self.server.got))
        if callable(answer):
            answer(self)
            return
        self.send_response(answer)
        self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerting, "ALERT_PAUSES_S", (0.01, 0.01, 0.01))


@pytest.fixture
def webhook() -> Iterator[Callable[..., Webhook]]:
    servers: list[Webhook] = []

    def make(*behave: Any) -> Webhook:
        servers.append(Webhook(*behave))
        return servers[-1]

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


def deliver(settings: AlertsConfig, count: int = 1) -> tuple[list[str], float]:
    """Deliver alerts; return what failed, and how long `put` took in all."""
    failed: list[str] = []
    one = SinkDelivery(settings, failed.append)
    began = time.monotonic()
    for number in range(count):
        one.put({**ALERT, "step": number})
    took_s = time.monotonic() - began
    one.close()
    return failed, took_s


def test_a_webhook_gets_the_alert_as_json_with_the_headers_of_the_environment(webhook, monkeypatch):
    server = webhook()
    monkeypatch.setenv("HOOK", f"{server.url}?key=value")
    monkeypatch.setenv("HOOK_HEADERS", "Authorization: Bearer secret\nX-Team: a: b")
    failed, _ = deliver(AlertsConfig(webhook_env="HOOK", headers_env="HOOK_HEADERS"))
    assert failed == [] and server.got == [("/hook?key=value", {**ALERT, "step": 0})]
    assert server.headers[0]["Authorization"] == "Bearer secret" and server.headers[0]["X-Team"] == "a: b"


def test_a_webhook_that_fails_is_tried_again(webhook):
    server = webhook(lambda number: 503 if number < 3 else 204)
    assert deliver(AlertsConfig(webhook=server.url))[0] == []
    assert len(server.got) == 3


def test_a_webhook_that_goes_on_failing_is_told_of_without_its_secret(webhook, monkeypatch):
    server = webhook(lambda number: 302)
    monkeypatch.setenv("HOOK", f"{server.url}?key=value")
    (why,), _ = deliver(AlertsConfig(webhook_env="HOOK"))
    assert "stall begins: webhook on 127.0.0.1 failed: status 302" in why and "key" not in why
    assert len(server.got) <= alerting.DELIVERY_TRIES, "redirects are not followed"


def drip(handler: BaseHTTPRequestHandler) -> None:
    """Answer a byte now and then, for ever."""
    try:
        for byte in b"HTTP/1.1 200 " + b"x" * 1000:
            handler.wfile.write(bytes([byte]))
            handler.wfile.flush()
            time.sleep(0.05)
    except OSError:
        pass


@pytest.mark.parametrize("behave", [lambda handler: time.sleep(5), drip], ids=["silent", "a byte now and then"])
def test_a_webhook_that_hangs_holds_up_nobody(webhook, behave):
    failed: list[str] = []
    one = SinkDelivery(AlertsConfig(webhook=webhook(lambda number: behave).url, timeout_s=0.3), failed.append)
    began = time.monotonic()
    for number in range(2):
        one.put({**ALERT, "step": number})
    assert time.monotonic() - began < 2 * alerting.DELIVERY_TRIES * 0.3, "put must not wait"
    wait_until(lambda: failed)
    one.close()
    assert time.monotonic() - began < 2 * alerting.DELIVERY_TRIES * 5, "or it waits for who hangs"
    assert "stall begins: webhook on 127.0.0.1 failed" in failed[0]


def test_a_host_that_is_not_there_is_told_of():
    (why,), _ = deliver(AlertsConfig(webhook="http://127.0.0.1:9/"))
    assert "ConnectionRefusedError" in why


def test_a_command_gets_the_alert_on_its_standard_input(tmp_path: Path):
    out = tmp_path / "got"
    write = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.stdin.read())"
    failed, _ = deliver(AlertsConfig(command=(sys.executable, "-c", write, str(out))))
    assert failed == [] and json.loads(out.read_text()) == {**ALERT, "step": 0}


def test_no_shell_reads_the_command(tmp_path: Path):
    deliver(AlertsConfig(command=("echo", f"$(touch {tmp_path}/x)", ";", f"touch {tmp_path}/x")))
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_hangs_is_killed_with_all_that_it_has_started(tmp_path: Path):
    late = tmp_path / "late"
    script = f"(sleep 1; touch {late}) & sleep 60"
    (why,), _ = deliver(AlertsConfig(command=("sh", "-c", script), timeout_s=0.3))
    assert "command sh failed: it took longer than 0.3 s" in why
    time.sleep(1.0)
    assert not late.exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [(("no-such-program",), "No such file"), (("sh", "-c", "echo it hurts >&2; exit 3"), "exit code 3 it hurts")],
)
def test_a_command_that_fails_is_told_of(command: tuple[str, ...], said: str):
    (why,), _ = deliver(AlertsConfig(command=command))
    assert said in why


def test_of_many_alerts_the_oldest_are_dropped(webhook):
    server = webhook(lambda number: lambda handler: time.sleep(5))
    failed: list[str] = []
    one = SinkDelivery(AlertsConfig(webhook=server.url), failed.append)
    for number in range(MOST_WAITING_ALERTS + 10):
        one.put({**ALERT, "step": number})
    assert 8 <= sum("was dropped" in why for why in failed) <= 10


@pytest.mark.parametrize(
    ("settings", "value", "said"),
    [
        ({"webhook_env": "HOOK"}, None, "this environment variable is not set"),
        ({"webhook_env": "HOOK"}, "ftp://x", "does not hold a URL"),
        ({"headers_env": "HOOK"}, "no colon", "does not hold headers"),
    ],
)
def test_a_bad_environment_is_one_message_that_names_the_key(settings, value, said, monkeypatch):
    if value is not None:
        monkeypatch.setenv("HOOK", value)
    with pytest.raises(UserError, match=rf"observe\.alerts\.{next(iter(settings))}.*{said}"):
        SinkDelivery(AlertsConfig(**settings), lambda why: None)


ADVICE = Path(__file__).parents[2] / "docs/advice.md"
BLOCK = re.compile(r"^```\w+ file=(\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""A block of a document that is a file."""
BAD = {
    "time_s": 1_700_000_010.0,
    "event": "bad_step",
    "step": 9,
    "reason": "not_finite",
    "loss": "nan",
    "grad_norm": "nan",
}


@pytest.fixture(autouse=True)
def _looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerting, "CHECK_EVERY_S", 0.0)


def run_with_a_bad_step(folder: Path) -> Path:
    """A run's folder in which the last step was not finite."""
    (folder / "events").mkdir(parents=True)
    lines = [{"step": step, "loss": 3.0, "step_time_s": 0.1, "time_s": 1_700_000_000.0 + step} for step in range(10)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "events/rank-0.jsonl").write_text(json.dumps(BAD) + "\n")
    return folder


def about(folder: Path, state: dict[str, Any] | None = None, **settings: Any) -> About:
    config = {"observe": {"alerts": {"on": ["nan"], **settings}}}
    return About("tiny", folder, json.loads(json.dumps(config)), {}, "", {} if state is None else state)


def told(folder: Path) -> list[tuple[str, str]]:
    return [(event["alert"], event["state"]) for event in read_lines(folder / "events/alerts.jsonl")]


def test_an_alert_is_written_down_once_also_after_a_restart(tmp_path: Path):
    folder = run_with_a_bad_step(tmp_path / "run")
    first = Alerting(about(folder))
    for _ in range(3):
        first.tick()
    again = Alerting(about(folder, json.loads(json.dumps(first.state))))
    again.tick()
    again.close(None)
    assert told(folder) == [("nan", "begins")]


def test_of_a_long_run_only_the_numbers_that_alerts_need_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = run_with_a_bad_step(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 10, "loss": 3.0, "seconds": {"forward": 0.1}}) + "\n")
    sink = Alerting(about(folder))
    monkeypatch.setattr(alerting, "KNOWN", 5)
    sink.tick()
    sink.close(None)
    assert set(sink._reader.steps) <= set(FIRST_KEYS)


def test_the_example_of_the_document_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = dict(BLOCK.findall(ADVICE.read_text()))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    run = load("alerts.toml")
    assert run.observe.alerts.are_delivered
    folder = run_with_a_bad_step(tmp_path / "run")
    sink = Alerting(about(folder, command=list(run.observe.alerts.command)))
    sink.tick()
    sink.close(None)
    assert re.match(r".*: nan begins: step 9 was not finite .+\n$", (tmp_path / "alerts.txt").read_text())
