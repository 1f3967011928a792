"""A run's own /metrics: who may read it, and what it says."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from argosy.config.dump import save_run
from argosy.config.schema import RunConfig
from argosy.sinks import prometheus
from argosy.sinks.prometheus import Prometheus
from argosy.sinks.worker import Feed, about
from run_folder import RunFolder
from waiting import PATIENT_S

TOKEN = "0123456789abcdef"


@contextmanager
def listening(path: Path, state: dict | None = None) -> Iterator[Prometheus]:
    sink = Prometheus(about(path, state or {}))
    try:
        yield sink
    finally:
        sink.close(None)


def get(address: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(address, headers={name.replace("_", "-"): text for name, text in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=PATIENT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_newest_of_a_run_is_there(tmp_path):
    run = RunFolder(tmp_path, prometheus={"port": 0})
    run.step(0, 1, communication={"tp": {"node": [0.5, 1024]}}, user={"my loss": 2.0})
    run.evaluation(1, 3.0)
    run.event("save", step=1)
    (tmp_path / "nodes").mkdir()
    line = {"time_s": 1.0, "devices": [{"name": "GPU", "power_w": 300.0, "clock_mhz": 1500}], "host": {"cpu": 0.5},
            "energy": {"joules": 40.0, "total_joules": 80.0}}  # fmt: skip
    (tmp_path / "nodes/one.jsonl").write_text(f"{json.dumps(line)}\n" * 2)
    with listening(tmp_path) as sink:
        Feed(tmp_path, {}).take().tell(sink)
        sink.tick()
        status, text = get(sink.state["address"])
    assert status == 200
    for line in (
        'argosy_steps_done{run="tiny"} 2',
        'argosy_loss{run="tiny"} 1.0',
        'argosy_validation_loss{run="tiny"} 3.0',
        'argosy_step_part_seconds{run="tiny",part="forward"} 0.2',
        'argosy_communication_bytes{run="tiny",axis="tp",tier="node"} 1024',
        'argosy_user_metric{run="tiny",name="my loss"} 2.0',
        'argosy_events_total{run="tiny",event="save"} 1',
        'argosy_device_power_watts{run="tiny",node="one",device="0",name="GPU"} 300.0',
        'argosy_device_clock_hertz{run="tiny",node="one",device="0",name="GPU"} 1500000000.0',
        'argosy_node_energy_joules_total{run="tiny",node="one"} 80.0',
    ):
        assert line in text.splitlines(), text


def test_a_sink_that_was_restarted_says_what_it_said(tmp_path):
    run = RunFolder(tmp_path)
    in_minutes = {"name": "tiny", "observe": {"prometheus": {"port": 0}}, "train": {"minutes": 1.0}}
    save_run(RunConfig.model_validate(in_minutes), tmp_path / "run.toml")
    run.step(0, 1)
    run.evaluation(1, 3.0)
    run.event("save")
    run.event("length", steps=7)
    with listening(tmp_path) as sink:
        Feed(tmp_path, {}).take().tell(sink)
        sink.rewind(1)
        state = json.loads(json.dumps(sink.state))
    with listening(tmp_path, state) as sink:
        _, text = get(sink.state["address"])
    assert 'argosy_steps_done{run="tiny"} 1' in text and 'argosy_steps_planned{run="tiny"} 7' in text
    assert "argosy_validation_loss" not in text  # it is of a step that was lost
    assert 'argosy_events_total{run="tiny",event="save"} 1' in text


def test_on_loopback_a_page_of_the_web_cannot_read_it(tmp_path):
    RunFolder(tmp_path, prometheus={"port": 0})
    with listening(tmp_path) as sink:
        assert get(sink.state["address"], Host="evil.example")[0] == 403
        assert get(sink.state["address"], Host="localhost:9464")[0] == 200
        assert get(sink.state["address"].replace("/metrics", "/../run.toml"))[0] == 404


def test_on_another_address_only_who_has_the_token_reads_it(tmp_path, monkeypatch):
    monkeypatch.setenv("ARGOSY_METRICS_TOKEN", TOKEN)
    RunFolder(tmp_path, prometheus={"port": 0, "host": "0.0.0.0"})
    with listening(tmp_path) as sink:
        address = sink.state["address"].replace("0.0.0.0", "127.0.0.1")
        assert get(address)[0] == 401
        assert get(address, Authorization="Bearer wrong")[0] == 401
        status, text = get(address, Authorization=f"Bearer {TOKEN}")
    assert status == 200
    assert TOKEN not in json.dumps(sink.state) + text


def test_a_port_that_is_taken_is_named(tmp_path):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        RunFolder(tmp_path, prometheus={"port": port})
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1, port {port}"):
            Prometheus(about(tmp_path, {}))


def test_a_peer_that_says_nothing_does_not_keep_others_waiting(tmp_path):
    RunFolder(tmp_path, prometheus={"port": 0})
    with listening(tmp_path) as sink:
        host, port = sink.state["address"].split("/")[2].split(":")
        with closing(socket.create_connection((host, int(port)))):
            assert get(sink.state["address"])[0] == 200


def test_strangers_that_send_slowly_keep_a_few_places_for_a_few_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(prometheus, "SCRAPE_LIMIT_S", 0.5)
    RunFolder(tmp_path, prometheus={"port": 0})
    with listening(tmp_path) as sink, ExitStack() as opened:
        host, port = sink.state["address"].split("/")[2].split(":")
        before = threading.active_count()
        slow = [
            opened.enter_context(socket.create_connection((host, int(port))))
            for _ in range(3 * prometheus.MOST_REQUESTS)
        ]
        deadline = time.monotonic() + 10
        while (answer := _status(sink)) != 200 and time.monotonic() < deadline:
            assert threading.active_count() - before <= 2 * prometheus.MOST_REQUESTS
            for one in slow:
                with suppress(OSError):
                    one.send(b"G")
        assert answer == 200


def test_threads_that_cannot_be_started_take_no_place_for_good(tmp_path, monkeypatch):
    RunFolder(tmp_path, prometheus={"port": 0})
    with listening(tmp_path) as sink:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            for _ in range(prometheus.MOST_REQUESTS):
                assert _status(sink) == 0
        assert _status(sink) == 200


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def _status(sink: Prometheus) -> int:
    try:
        return get(sink.state["address"])[0]
    except OSError:
        return 0
