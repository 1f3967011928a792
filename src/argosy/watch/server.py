"""The server of `argosy watch`: JSON of the runs under a folder, news while they train, Prometheus, and the page.

docs/watch-api.md says what each address answers. All of it is read only. Each request is answered in a thread of its
own, so that a long run that is being opened keeps neither the news nor other runs waiting.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from argosy.errors import UserError
from argosy.plan.report.explain import shown_stops
from argosy.watch import overview, rank_view, steps
from argosy.watch.conclusions import conclusions_of
from argosy.watch.library import Library, OpenRun, Unreadable, run_folder
from argosy.watch.linefile import leads_away
from argosy.watch.metrics_table import VALIDATION_ACCURACY, Preview
from argosy.watch.prometheus import CONTENT_TYPE, LatestFacts, exposition
from argosy.watch.reader import RunReader, RunTail
from argosy.watch.rules.stops import StopsSoFar
from argosy.watch.status import next_action, standing_of, status_of
from argosy.watch.timeline import shown_events

LIVE_NEWS_S = 1.0
LIVE_BEAT_S = 10.0
"""Most seconds between two events of the live line, by which the page knows that it is there."""
MOST_LISTENERS = 100
EVENTS_IN_ANSWER = 5000
"""Events in one answer; the newest are there."""
PROFILE_FILES = (".json.gz", ".json", ".pickle")

View = Callable[["QueryParameters", OpenRun], Any]


class WrongParameter(UserError):
    """A parameter of a request has no value that it can have."""


class QueryParameters:
    """The parameters of a request. Raises: WrongParameter if one is no such value."""

    def __init__(self, request: Request):
        self._query = request.query_params

    def number(self, name: str) -> float | None:
        """Return a step, or None if it was not given."""
        text = self._query.get(name)
        if text is None or text == "":
            return None
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not abs(value) < 2**53:
            raise WrongParameter(f"{name} = {text[:40]!r}: a number is needed, such as {name}=100")
        return value

    def count(self, name: str, default: int, most: int) -> int:
        """Return a number of points, rows or the like, of at most `most`."""
        value = self.number(name)
        if value is not None and value < 1:
            raise WrongParameter(f"{name} = {value:g}: at least 1 is needed")
        return default if value is None else int(min(value, most))

    def words(self, name: str) -> list[str]:
        """Return a list that is separated by commas, empty if it was not given."""
        return [word for word in self._query.get(name, "").split(",") if word]

    def text(self, name: str, default: str) -> str:
        return self._query.get(name) or default

    @property
    def steps(self) -> tuple[float | None, float | None]:
        return self.number("from"), self.number("to")


def _series(query: QueryParameters, run: OpenRun) -> Any:
    return _series_of(query, run.reader)


def _series_of(query: QueryParameters, run: RunReader | Preview) -> Any:
    points = query.count("points", steps.STEP_SERIES_POINTS, steps.MOST_SERIES_POINTS)
    return steps.series(run, query.words("keys") or ["loss"], *query.steps, points)


def _evaluations(query: QueryParameters, run: OpenRun) -> Any:
    table = run.reader.evaluations
    tasks = {key: list(zip(*curve, strict=True)) for key, curve in run.reader.task_scores().items()}
    return {
        "step": table["step"],
        "loss": table["validation_loss"],
        "bits_per_byte": table["bits_per_byte"],
        **({"accuracy": table[VALIDATION_ACCURACY]} if VALIDATION_ACCURACY in table else {}),
        **({"tasks": tasks} if tasks else {}),
    }


def _time(query: QueryParameters, run: OpenRun) -> Any:
    return steps.step_parts(
        run.reader, *query.steps, query.count("points", steps.STEP_SERIES_POINTS, steps.MOST_SERIES_POINTS)
    )


def _ranks(query: QueryParameters, run: OpenRun) -> Any:
    rows = query.count("rows", rank_view.SHOWN_ROWS, rank_view.MOST_SHOWN_ROWS)
    columns = query.count("points", rank_view.SHOWN_COLUMNS, rank_view.MOST_COLUMNS)
    low, high = query.number("rank_from"), query.number("rank_to")
    ranks = int(low or 0), None if high is None else int(high)
    return rank_view.rank_map(run.reader, query.text("key", rank_view.OWN_SERIES), *query.steps, rows, columns, *ranks)


def _events(query: QueryParameters, run: OpenRun) -> Any:
    found = overview.run_timeline(run.reader)
    events = list(shown_events(run.reader.events, found, query.words("kinds") or None))
    phases = [asdict(stretch) for stretch in found.stretches]
    more = max(0, len(events) - EVENTS_IN_ANSWER)
    return {"events": events[more:], "goodput": overview.goodput(run.reader, found), "phases": phases, "more": more}


def _advice(query: QueryParameters, run: OpenRun) -> Any:
    found = conclusions_of(run.reader)
    return {
        "advice": [asdict(advice) for advice in found.advice],
        "forecast": None if found.forecast is None else asdict(found.forecast),
        "stops": None if found.stops is None else _stops(found.stops),
        "alerts": [asdict(alert) for alert in found.alerts],
        "next": next_action(run.reader, standing_of(found.alerts), found.advice).model_dump(),
    }


def _stops(found: StopsSoFar) -> Any:
    of_each = [asdict(each) | {"called": each.called} for each in shown_stops(found.components)]
    return asdict(found) | {"components": of_each}


VIEWS: dict[str, View] = {
    "status": lambda query, run: status_of(run.reader, query.text("since", "")).model_dump(),
    "series": _series,
    "evaluations": _evaluations,
    "time": _time,
    "memory": lambda query, run: steps.memory(run.reader),
    "ranks": _ranks,
    "devices": lambda query, run: rank_view.devices(run.reader, *query.steps),
    "events": _events,
    "model": lambda query, run: overview.model(run.reader, *query.steps),
    "advice": _advice,
    "energy": lambda query, run: overview.energy(run.reader, run.meter),
    "profiles": lambda query, run: overview.profiles(run.reader),
    "log": lambda query, run: overview.logs(run.reader),
}
"""The last part of an address -> what answers it."""


class Api:
    """The addresses under /api, and /metrics."""

    def __init__(self, library: Library):
        self._library = library
        self.news = Broadcast(library)

    def routes(self) -> list[Route]:
        """Return all routes; an id may hold slashes, so the longest address comes first."""
        views = [Route(f"/api/runs/{{run_id:path}}/{name}", partial(self.view, view)) for name, view in VIEWS.items()]
        return [
            Route("/api/live", self.live),
            Route("/api/runs", self.runs),
            Route("/api/runs/{run_id:path}/profiles/{profile}/{file}", self.profile_file),
            Route("/api/runs/{run_id:path}/preview", self.preview),
            *views,
            Route("/api/runs/{run_id:path}", self.run),
            Route("/metrics", self.metrics),
        ]

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Look for news while the server runs."""
        task = asyncio.create_task(self.news.follow())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def runs(self, request: Request) -> Response:

        def line(run_id: str, tail: RunTail) -> msgspec.Raw:
            return msgspec.Raw(encoded(overview.line(run_id, tail)))

        def unreadable(run_id: str, why: str) -> msgspec.Raw:
            return msgspec.Raw(encoded(overview.unreadable(run_id, why)))

        return await _answer(lambda: self._library.ask_all(line, unreadable))

    async def run(self, request: Request) -> Response:
        run_id = request.path_params["run_id"]
        return await _answer(lambda: self._opened(run_id, lambda entry: overview.details(run_id, entry.reader)))

    async def view(self, view: View, request: Request) -> Response:
        query, run_id = QueryParameters(request), request.path_params["run_id"]
        return await _answer(lambda: self._opened(run_id, partial(view, query)))

    async def preview(self, request: Request) -> Response:
        """Answer /api/runs/ID/preview: `series`, out of some lines if the run is long and not read yet."""
        query, run_id = QueryParameters(request), request.path_params["run_id"]

        def previewed() -> Any:
            if (found := self._library.preview(run_id)) is not None:
                return _series_of(query, found)
            return self._opened(run_id, partial(_series, query))

        return await _answer(previewed)

    def _opened(self, run_id: str, answer: Callable[[OpenRun], Any]) -> bytes:
        # Encoded while nobody else reads the run: arrays may change afterwards.
        return self._library.ask(run_id, lambda entry: encoded(answer(entry)))

    async def profile_file(self, request: Request) -> Response:
        """Answer /api/runs/ID/profiles/NAME/FILE: a trace, as a file to be saved."""
        profile, file = request.path_params["profile"], request.path_params["file"]
        path = await anyio.to_thread.run_sync(self._profile_path, request.path_params["run_id"], profile, file)
        return FileResponse(path, filename=file, content_disposition_type="attachment")

    def _profile_path(self, run_id: str, profile: str, file: str) -> Path:
        folder = _folder(self._library.root, run_id)
        name = f"profiles/{profile}/{file}"
        path = folder / name
        plain = not any(part.startswith(".") or "\\" in part or "\0" in part for part in (profile, file))
        if not plain or not file.endswith(PROFILE_FILES) or not path.is_file() or leads_away(folder, name):
            raise HTTPException(404, "no such file")
        if not path.resolve().is_relative_to(folder):
            raise HTTPException(404, "no such file")
        return path

    async def metrics(self, request: Request) -> Response:
        runs = await anyio.to_thread.run_sync(lambda: self._library.ask_all(latest, _untold))
        text = await anyio.to_thread.run_sync(exposition, runs)
        return Response(text, media_type=None, headers={"content-type": CONTENT_TYPE})

    async def live(self, request: Request) -> Response:
        """Answer /api/live: server-sent events."""
        if self.news.listeners >= MOST_LISTENERS:
            raise HTTPException(503, f"{MOST_LISTENERS} pages listen already")
        headers = {"x-accel-buffering": "no"}  # a proxy must pass each event on at once
        return StreamingResponse(self.news.listen(), media_type="text/event-stream", headers=headers)


class Broadcast:
    """Tells all listeners which runs changed. A listener that is slow gets the newest, not all."""

    def __init__(self, library: Library):
        self._library = library
        self._pending: dict[object, dict[str, dict[str, Any]]] = {}
        self._wake: dict[object, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_ended = False

    @property
    def listeners(self) -> int:
        return len(self._pending)

    async def follow(self) -> None:
        """Look for news about once a second, as long as anybody listens."""
        # A thread of its own: those of requests may all be busy.
        limiter = anyio.CapacityLimiter(1)
        self._loop = asyncio.get_running_loop()
        known: dict[str, tuple[Any, ...]] = {}
        while True:
            began = time.monotonic()
            if self._pending:
                with suppress(OSError):
                    for news in await anyio.to_thread.run_sync(self._library.news, known, limiter=limiter):
                        for each in self._pending.values():
                            each[news["id"]] = news
                    for listener in [n for n, each in self._pending.items() if each]:
                        self._wake[listener].set()
            await asyncio.sleep(max(LIVE_NEWS_S, 4 * (time.monotonic() - began)))

    def end(self) -> None:
        """Let all listeners go: the server ends. Called from a signal handler."""
        self._has_ended = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        for event in self._wake.values():
            event.set()

    async def listen(self) -> AsyncIterator[bytes]:
        """Yield events as they come, and a beat in between."""
        me = object()
        self._pending[me], self._wake[me] = {}, asyncio.Event()
        try:
            yield b"retry: 2000\nevent: beat\ndata: {}\n\n"
            while not self._has_ended:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake[me].wait(), LIVE_BEAT_S)
                self._wake[me].clear()
                pending, self._pending[me] = self._pending[me], {}
                for news in pending.values():
                    yield b"event: run\ndata: " + msgspec.json.encode(news) + b"\n\n"
                if not pending:
                    yield b"event: beat\ndata: {}\n\n"
        finally:
            del self._pending[me], self._wake[me]


def latest(run_id: str, tail: RunTail) -> LatestFacts:
    line = overview.line(run_id, tail)
    return LatestFacts(
        run=run_id,
        plan=line["plan"] or "",
        model=line["model"] or "",
        steps=line["steps"],
        step=tail.last_line,
        evaluation=tail.last_evaluation,
        nodes={node: series.last for node, series in tail.nodes.items()},
        events=tail.event_counts,
        state=tail.state,
    )


def _untold(run_id: str, why: str) -> LatestFacts:
    return LatestFacts(run_id, state="unreadable")


async def _answer(compute: Callable[[], Any]) -> Response:
    try:
        found = await anyio.to_thread.run_sync(compute)
    except WrongParameter as error:
        raise HTTPException(400, str(error)) from None
    except UserError as error:
        raise HTTPException(404, str(error)) from None
    except Unreadable as error:
        raise HTTPException(500, str(error)) from None
    body = found if isinstance(found, bytes) else encoded(found)
    return Response(body, media_type="application/json")


def encoded(value: Any) -> bytes:
    """Return JSON; what is not finite is null."""
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value)} in an answer")


def _folder(root: Path, run_id: str) -> Path:
    try:
        return run_folder(root, run_id)
    except UserError as error:
        raise HTTPException(404, str(error)) from None


async def failed_answer(request: Request, error: Exception) -> Response:
    """Answer with a sentence as JSON under /api, and as text elsewhere."""
    code = error.status_code if isinstance(error, HTTPException) else 500  # uvicorn prints its traceback
    text = error.detail if isinstance(error, HTTPException) else "the server failed; its terminal says more"
    if request.url.path.startswith("/api/"):
        return Response(encoded({"error": text}), code, media_type="application/json")
    return PlainTextResponse(f"{text}\n", code)
