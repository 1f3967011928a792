"""A real receiver of OTLP over HTTP decodes the spans of a run."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from argosy.sinks.worker import SinkSession
from run_folder import RunFolder


class Collector:
    """Listens as a collector does."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], ExportTraceServiceRequest]] = []
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if outer.status == 200:
                    request = ExportTraceServiceRequest.FromString(body)
                    outer.requests.append((self.path, dict(self.headers), request))
                self.send_response(outer.status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for _, _, request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def named(self, name: str) -> list[tuple[float, float]]:
        """Start and end of the spans of a name, seconds."""
        return [(s.start_time_unix_nano / 1e9, s.end_time_unix_nano / 1e9) for s in self.spans if s.name == name]


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


BASE = 1.8e9


def event(run: RunFolder, at_s: float, kind: str, **facts: Any) -> None:
    run.event(kind, **{**facts, "time_s": BASE + at_s})


def a_whole_run(run: RunFolder) -> None:
    """Started, 5 steps, a death after the third, the rest, the end."""
    event(run, -10, "settled", seconds=5.0)
    event(run, -9, "worker_started", slot=0)
    event(run, -6, "generation", generation=1)
    event(run, -4, "start", step=0, world_size=2)
    run.step(0, 1, 2, seconds={"forward": 0.2, "step": 0.5})
    event(run, 2.1, "save", step=3, seconds=0.1)
    event(run, 2.2, "break", why="rank 1 is lost")
    event(run, 2.3, "generation", generation=2)
    event(run, 2.6, "recovered", step=3, source="live")
    event(run, 2.7, "start", step=3, world_size=2)
    run.step(3, 4, seconds={"forward": 0.2, "evaluate": 0.1, "step": 0.5})
    event(run, 5.0, "end", step=5)
    end = {"time_s": BASE + 5.1, "event": "end", "step": 5}
    (run.path / "events/rank-1.jsonl").write_text(f"{json.dumps(end)}\n")  # every rank says so


def near(*spans: tuple[float, float]) -> list[Any]:
    return [pytest.approx((BASE + start, BASE + end), abs=1e-5) for start, end in spans]


def test_the_phases_of_a_run_are_one_trace(tmp_path, collector):
    run = RunFolder(tmp_path, opentelemetry={"endpoint": collector.address, "steps_per_span": 2, "service": "mine"})
    told = SinkSession(tmp_path, "opentelemetry")
    a_whole_run(run)
    told.catch_up()
    told.close()
    assert len({span.trace_id for span in collector.spans}) == 1
    (root,) = [span for span in collector.spans if span.name == "run"]
    assert all(span.parent_span_id == root.span_id for span in collector.spans if span is not root)
    assert len({span.span_id for span in collector.spans}) == len(collector.spans)
    assert collector.named("run") == near((-15, 5))
    assert collector.named("data") == near((-15, -10))
    assert collector.named("start") == near((-9, -4))
    assert collector.named("world") == near((-6, -4), (2.3, 2.7))
    assert collector.named("save") == near((2.0, 2.1))
    assert collector.named("recovery") == near((2.2, 2.6))
    assert collector.named("evaluate") == near((2.9, 3), (3.9, 4))
    assert collector.named("steps") == near((-0.5, 1), (1.5, 3), (3.5, 4))
    assert len(collector.named("end")) == 1
    path, _headers, request = collector.requests[0]
    assert path == "/v1/traces"
    resource = {a.key: a.value.string_value for a in request.resource_spans[0].resource.attributes}
    assert resource["service.name"] == "mine"


def test_a_run_that_goes_on_is_the_same_trace_and_a_span_that_comes_twice_is_one(tmp_path, collector):
    run = RunFolder(tmp_path, opentelemetry={"endpoint": collector.address, "steps_per_span": 2})
    a_whole_run(run)
    told = SinkSession(tmp_path, "opentelemetry")
    kept_trace = told.sink.state["trace"]
    told.catch_up()
    before = {span.span_id for span in collector.spans}
    (tmp_path / "sinks/opentelemetry.json").write_text(f'{{"marks": {{}}, "state": {{"trace": "{kept_trace}"}}}}')
    told = SinkSession(tmp_path, "opentelemetry")
    told.catch_up()
    assert {span.span_id for span in collector.spans} == before
    assert len({span.trace_id for span in collector.spans}) == 1


def test_the_standard_variables_are_honoured(tmp_path, collector, monkeypatch):
    for name, value in {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.address,
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20xyz",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        "OTEL_SERVICE_NAME": "trainer",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=lab",
    }.items():
        monkeypatch.setenv(name, value)
    run = RunFolder(tmp_path)
    a_whole_run(run)
    told = SinkSession(tmp_path, "opentelemetry")
    told.catch_up()
    path, headers, request = collector.requests[0]
    assert path == "/v1/traces"
    assert headers["authorization"] == "Bearer xyz"
    resource = {a.key: a.value.string_value for a in request.resource_spans[0].resource.attributes}
    assert (resource["service.name"], resource["deployment.environment"]) == ("trainer", "lab")


@pytest.mark.parametrize("status", [400, 301])
def test_a_collector_that_refuses_is_an_error_and_the_spans_come_again(tmp_path, collector, status):
    run = RunFolder(tmp_path, opentelemetry={"endpoint": collector.address})
    a_whole_run(run)
    collector.status = status
    told = SinkSession(tmp_path, "opentelemetry")
    with pytest.raises(ConnectionError, match="did not take the spans"):
        told.catch_up()
    collector.status = 200
    again = SinkSession(tmp_path, "opentelemetry")
    again.catch_up()
    assert len(collector.named("start")) == 1
    assert again.sink.state["trace"] == told.sink.state["trace"]  # it may have taken what it did not answer


def test_without_a_collector_the_error_says_where_none_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    a_whole_run(RunFolder(tmp_path))
    with pytest.raises(ConnectionError, match=f"the collector at {address} did not take the spans: does it run"):
        SinkSession(tmp_path, "opentelemetry").catch_up()


def test_the_default_endpoint_is_that_of_the_standard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    asked: list[str] = []

    def refused(session: requests.Session, method: str, url: str, **_: Any) -> None:
        asked.append(url)
        raise requests.exceptions.InvalidURL(url)

    monkeypatch.setattr(requests.Session, "request", refused)
    a_whole_run(RunFolder(tmp_path))
    with pytest.raises((ConnectionError, requests.exceptions.InvalidURL)):
        SinkSession(tmp_path, "opentelemetry").catch_up()
    assert set(asked) == {"http://localhost:4318/v1/traces"}
