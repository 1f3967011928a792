"""OpenTelemetry: the phases of a run as spans of one trace, by OTLP over HTTP.

    run
      start     from the first process to the first step         world      its ranks find each other
      data      data prepared, sizes and plan settled             steps      so many steps, with where their time went
      save      a checkpoint is written                           verify     and read back
      evaluate  the model is scored                               recovery   from what broke to the next step
      end       after the last step

Ids follow from the run and the phase, so that a span that is sent twice is one span. What OTEL_* variables say of the
exporter (endpoint, headers, timeout, compression) and the resource holds, unless the run file says otherwise.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Sequence
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from argosy.sinks.sink import About, Record, Sink, is_repeated

ROOT = "run"
FROM_SECONDS = {"save": "save", "verified": "verify", "settled": "data"}
"""Events that say how long something took -> the span."""
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables that name the collector where the run file does not; the exporter reads them in this order."""
DEFAULT_ENDPOINT = "http://localhost:4318"
MOST_SPANS = 500
"""Most spans in one request."""


def _session() -> requests.Session | None:
    """Return a session to which a redirect is a failure: the exporter does not follow it, and takes it for success.

    None if the exporter is to make one with credentials of a provider that a variable names.
    """

    def refuse(response: requests.Response, **request: Any) -> None:
        if 300 <= response.status_code < 400:
            raise requests.TooManyRedirects(f"status {response.status_code}")

    if any(name.endswith("_CREDENTIAL_PROVIDER") for name in os.environ if name.startswith("OTEL_PYTHON_EXPORTER_")):
        return None
    session = requests.Session()
    session.hooks["response"].append(refuse)
    return session


class FixedIds(IdGenerator):
    """Gives the ids that are set."""

    trace_id = span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class EndedSpans(SpanProcessor):
    """Holds the spans that have ended, until they are sent."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class OpenTelemetry(Sink):
    """Sends a run's trace. State: `trace`, `began_s`, and what is open."""

    def __init__(self, about: About):
        super().__init__(about)
        settings = about.config["observe"]["opentelemetry"]
        endpoint, service = settings["endpoint"], settings["service"]
        self._collector = endpoint or next(filter(None, map(os.environ.get, ENDPOINTS)), DEFAULT_ENDPOINT)
        self._steps_per_span: int = settings["steps_per_span"]
        self._exporter = OTLPSpanExporter(
            endpoint=f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None, session=_session()
        )
        resource = Resource.create({"service.name": service} if service else {})
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "argosy"}))
        self._ids, self._ended = FixedIds(), EndedSpans()
        provider = TracerProvider(ALWAYS_ON, resource, id_generator=self._ids, shutdown_on_exit=False)
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("argosy")
        self.state.setdefault("trace", uuid.uuid4().hex)
        self.state.setdefault("steps", [])
        self._ids.trace_id = int(self.state["trace"], 16)
        root = SpanContext(self._ids.trace_id, self._id(ROOT), is_remote=False, trace_flags=TraceFlags(1))
        self._in_root = set_span_in_context(NonRecordingSpan(root))

    def steps(self, records: Sequence[Record]) -> None:
        for record in records:
            if "time_s" not in record:
                continue
            self.state["last_s"] = record["time_s"]
            took_s = record["seconds"]["step"] if "step" in record["seconds"] else record["step_time_s"]
            evaluate_s = record["seconds"].get("evaluate", 0.0)
            if evaluate_s:
                self._add("evaluate", record["time_s"] - evaluate_s, record["time_s"], record["step"])
            self.state["steps"].append(
                {
                    "step": record["step"], "start_s": record["time_s"] - took_s, "end_s": record["time_s"],
                    "loss": record["loss"], "tokens_per_s": record["tokens_per_s"], "seconds": record["seconds"],
                }
            )  # fmt: skip
            if len(self.state["steps"]) >= self._steps_per_span:
                self._end_bundle()

    def events(self, records: Sequence[Record]) -> None:
        for record in records:
            if not is_repeated(record):
                self._note(record["event"], record["time_s"], record)

    def rewind(self, step: int) -> None:
        """Leave lost steps out that were not sent. Those that were sent did happen, before a recovery."""
        self.state["steps"] = [entry for entry in self.state["steps"] if entry["step"] < step]
        self._end_bundle()

    def tick(self) -> None:
        """Send what has ended. Raises: ConnectionError if the collector does not take it."""
        while self._ended.spans:
            batch = self._ended.spans[:MOST_SPANS]
            if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
                raise ConnectionError(
                    f"the collector at {self._collector} did not take the spans: does it run, and is "
                    "observe.opentelemetry.endpoint right?"
                )
            del self._ended.spans[:MOST_SPANS]

    def close(self, report: Record | None) -> None:
        """End the bundle and the run's own span, and send them. A run that goes on sends that span again, longer."""
        self._end_bundle()
        end_s = self.state.get("ended_s", self.state.get("last_s"))
        if "began_s" in self.state and end_s is not None:
            facts = {"argosy.status": (report or {}).get("status", "stopped"), "argosy.plan": self.about.plan_text}
            self._span(ROOT, self._id(ROOT), self.state["began_s"], end_s, {"argosy.run": self.about.name, **facts})
        self.tick()

    def _note(self, kind: str, time_s: float, event: Record) -> None:
        state = self.state
        state.setdefault("began_s", time_s - event.get("seconds", 0.0) if kind == "settled" else time_s)
        if kind in FROM_SECONDS and "seconds" in event:
            self._add(FROM_SECONDS[kind], time_s - event["seconds"], time_s, event.get("step"))
        elif kind == "worker_started":
            state.setdefault("starting_s", time_s)
        elif kind == "generation":
            state["world_s"] = time_s
        elif kind in ("break", "worker_died"):
            state.setdefault("broken_s", time_s)
        elif kind == "recovered" and "broken_s" in state:
            self._end_bundle()
            self._add("recovery", state.pop("broken_s"), time_s, event.get("step"), source=event.get("source"))
        elif kind == "start":
            if "world_s" in state:
                self._add("world", state.pop("world_s"), time_s, event.get("step"), ranks=event.get("world_size"))
            if "starting_s" in state:
                self._add("start", state.pop("starting_s"), time_s, event.get("step"))
        elif kind == "end":
            self._end_bundle()
            state["ended_s"] = time_s
            self._add("end", state.get("last_s", time_s), time_s, event.get("step"))

    def _end_bundle(self) -> None:
        """Make a span of the steps that are at hand."""
        steps, self.state["steps"] = self.state["steps"], []
        if not steps:
            return
        first, last = steps[0], steps[-1]
        facts: dict[str, Any] = {"last_step": last["step"], "loss": last["loss"]}
        facts["tokens_per_s"] = sum(entry["tokens_per_s"] for entry in steps) / len(steps)
        for part in {part for entry in steps for part in entry["seconds"]}:
            facts[f"seconds.{part}"] = sum(entry["seconds"].get(part, 0.0) for entry in steps)
        self._add("steps", first["start_s"], last["end_s"], first["step"], **facts)

    def _add(self, name: str, start_s: float, end_s: float, step: int | None = None, **facts: Any) -> None:
        facts = {f"argosy.{key}": value for key, value in {"step": step, **facts}.items() if value is not None}
        self._span(name, self._id(f"{name} {start_s:.6f}"), start_s, end_s, facts)

    def _span(self, name: str, span_id: int, start_s: float, end_s: float, facts: dict[str, Any]) -> None:
        self._ids.span_id = span_id
        context = None if name == ROOT else self._in_root
        start_ns, end_ns = int(1e9 * start_s), int(1e9 * max(start_s, end_s))
        self._tracer.start_span(name, context, start_time=start_ns, attributes=facts).end(end_ns)

    def _id(self, of: str) -> int:
        return int.from_bytes(hashlib.sha256(f"{self.state['trace']} {of}".encode()).digest()[:8]) or 1
