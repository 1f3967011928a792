"""Measures the links between the sites of a run, over connections as sites use them: `argosy probe --site NAME`.

Each site's command connects to all others, with the run's secret and TLS as the run file has it. The first site of the
run file says which pair measures, one after the other, in both directions: a message there and back, some times, then
pieces of 256 KiB as fast as they are taken, as in the exchange of a round. So the rate has in it what hashing and
encrypting cost. At the end all sites hold the same list.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from argosy.config.schema import RunConfig
from argosy.errors import RunFailed
from argosy.plan.hardware.clusters import SiteLink
from argosy.plan.hardware.measurements import four_digits
from argosy.sync.sites.links import Links
from argosy.sync.sites.messages import Message
from argosy.sync.sites.pull import AHEAD_BYTES, PIECE_BYTES

PIECE = bytes(PIECE_BYTES)
AHEAD = AHEAD_BYTES // PIECE_BYTES
"""Pieces that may be on the way."""
ECHOES = 20
STREAM_S, FEWEST = 4.0, 16
"""How long pieces are sent for; and pieces that are sent however long it takes."""
TURN_S = 0.05
SAID_AGAIN_S = 10.0


@dataclass
class _Stream:
    """What this site sends to measure the way to another."""

    to: str
    asked_s: float = 0.0
    """When the message that is to come back was sent."""
    trips_s: list[float] = field(default_factory=list)
    sent: int = 0
    taken: int = 0
    began_s: float = 0.0
    ended: bool = False


class SitesProbe:
    """One site's part in the measurement."""

    def __init__(self, run: RunConfig, links: Links, say: Callable[[str], None]):
        self.names = [site.name for site in run.sites]
        self.me, self._links, self._say = run.site, links, say
        self.hellos: dict[str, Message] = {}
        """What each other site said of itself."""
        self._found: dict[tuple[str, str], dict[str, float]] = {}
        self._stream: _Stream | None = None
        self._left = list(permutations(self.names, 2)) if self.me == self.names[0] else []
        self._measuring: tuple[str, str] | None = None
        self._done: set[str] = set()
        self._result: list[dict[str, Any]] = []
        self._received: dict[str, tuple[int, float]] = {}

    def measure(self, seconds: float, refused: Callable[[], str]) -> tuple[SiteLink, ...]:
        """Return the links between all sites. Raises: RunFailed if a site is missing after so many seconds.

        refused: says why a connection was refused, if one was.
        """
        until, said_s = time.monotonic() + seconds, 0.0
        while not self._is_over():
            now = time.monotonic()
            missing = [name for name in self.names if name not in (self.me, *self._links.sites)]
            if now > until:
                waited = f"waited for {', '.join(missing)}" if missing else "the measurement was not done"
                raise RunFailed(
                    f"{waited} for {seconds:.0f} s. {refused()}Nothing was written. Give the command at each site at "
                    "about the same time; --minutes says how long it waits."
                )
            if missing and not self._result and now - said_s > SAID_AGAIN_S:
                self._say(f"waiting for {', '.join(missing)}")
                said_s = now
            for name, message in self._links.turn(TURN_S):
                try:
                    self._hear(name, message)
                except (KeyError, TypeError, ValueError) as problem:
                    raise RunFailed(
                        f"what {name} says is no part of a probe ({problem!r}). Nothing was written."
                    ) from None
            self._lead()
            self._send()
        return tuple(SiteLink(**link) for link in self._result)

    def _is_over(self) -> bool:
        if not self._result:
            return False
        others = {name for name in self.names if name != self.me}
        return self.me != self.names[0] or others <= self._done or not self._links.sites

    # ---- the first site, which says who measures ------------------------------------------------------------------

    def _lead(self) -> None:
        if self.me != self.names[0] or self._measuring or self._result or len(self._links.sites) + 1 < len(self.names):
            return
        if self._left:
            self._measuring = self._left.pop(0)
            sender, to = self._measuring
            self._say(f"measuring from {sender} to {to}")
            if sender == self.me:
                self._begin(to)
            else:
                self._links.tell(sender, "measure", to=to)
            return
        self._result = joined_links(self._found)
        self._links.tell_all("links", links=self._result)

    def _note(self, sender: str, to: str, facts: Mapping[str, float]) -> None:
        if self._measuring == (sender, to):
            self._found[sender, to] = {key: float(facts[key]) for key in ("bytes_per_s", "latency_s")}
            self._measuring = None

    # ---- a pair ---------------------------------------------------------------------------------------------------

    def _begin(self, to: str) -> None:
        self._stream = _Stream(to, asked_s=time.monotonic())
        self._links.tell(to, "echo")

    def _hear(self, name: str, message: Message) -> None:
        stream = self._stream
        match message["kind"]:
            case "hello":
                self.hellos[name] = message
                self._say(f"{name} is there")
            case "measure":
                self._begin(str(message["to"]))
            case "echo":
                self._received.pop(name, None)
                self._links.tell(name, "echoed")
            case "echoed" if stream is not None and stream.to == name:
                self._echoed(stream)
            case "piece":
                self._links.tell(name, "taken", **self._take(name, message))
            case "taken" if stream is not None and stream.to == name:
                stream.taken += 1
                if message["last"]:
                    self._report(stream, float(message["bytes_per_s"]))
            case "measured" if self.me == self.names[0]:
                self._note(name, str(message["to"]), message)
            case "links":
                self._result = list(message["links"])
                self._links.tell(name, "bye")
            case "bye":
                self._done.add(name)

    def _take(self, name: str, message: Message) -> dict[str, Any]:
        """Count a piece. With the last one, return the rate from the first one's arrival to the last one's."""
        pieces, first_s = self._received.get(name, (0, time.monotonic()))
        self._received[name] = pieces + 1, first_s
        if not message["last"]:
            return {"last": False}
        took_s = max(1e-6, time.monotonic() - first_s)
        return {"last": True, "bytes_per_s": pieces * len(PIECE) / took_s}

    def _echoed(self, stream: _Stream) -> None:
        now = time.monotonic()
        stream.trips_s.append(now - stream.asked_s)
        stream.asked_s = now
        if len(stream.trips_s) < ECHOES:
            self._links.tell(stream.to, "echo")
        else:
            stream.began_s = now

    def _send(self) -> None:
        """Send what may be on the way."""
        stream = self._stream
        while stream is not None and stream.began_s and not stream.ended and stream.sent - stream.taken < AHEAD:
            stream.sent += 1
            stream.ended = stream.sent >= FEWEST and time.monotonic() - stream.began_s > STREAM_S
            self._links.tell(stream.to, "piece", PIECE, last=stream.ended)

    def _report(self, stream: _Stream, bytes_per_s: float) -> None:
        facts = {"bytes_per_s": bytes_per_s, "latency_s": statistics.median(stream.trips_s) / 2}
        self._stream = None
        if self.me == self.names[0]:
            self._note(self.me, stream.to, facts)
        else:
            self._links.tell(self.names[0], "measured", to=stream.to, **facts)


def joined_links(found: Mapping[tuple[str, str], Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return each pair's link, as `SiteLink` has it: of both directions the slower rate, and the longer latency."""
    pairs = [(a, b) for a, b in found if (b, a) in found and list(found).index((a, b)) < list(found).index((b, a))]
    return [
        {
            "sites": [a, b],
            "bandwidth_bytes_per_s": four_digits(min(found[a, b]["bytes_per_s"], found[b, a]["bytes_per_s"])),
            "latency_s": four_digits(max(found[a, b]["latency_s"], found[b, a]["latency_s"])),
        }
        for a, b in pairs
    ]
