"""Measures the links between the sites of a run, over connections as sites use them: `argosy probe --site NAME`.

Each site's command connects to all others, with the run's secret and TLS as the run file has it. The first site of the
run file says which pair measures, one after the other, in both directions: a message there and back, some times, then
pieces of 256 KiB as fast as they are taken, as in the exchange of a round. So the rate has in it what hashing and
encrypting cost. At the end all sites hold the same list.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import combinations, permutations
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from argosy.config.schema import RunConfig
from argosy.errors import RunFailed, UserError
from argosy.launch.sites import check_addresses
from argosy.observe.screen import Progress
from argosy.plan.hardware.clusters import Cluster, NetworkTier, SiteLink
from argosy.plan.hardware.measurements import Measurements, four_digits
from argosy.processes.connection import DEFERRED, WireRecord
from argosy.sync.ledger import SiteName
from argosy.sync.links import Links, open_links
from argosy.sync.messages import AHEAD_BYTES, MESSAGE_PIECE_BYTES, VERSION, Ping, Refusal, SiteHello

PIECE = bytes(MESSAGE_PIECE_BYTES)
PIECES_AHEAD = AHEAD_BYTES // MESSAGE_PIECE_BYTES
"""Pieces that may be on the way."""
ECHOES = 20
STREAM_S, FEWEST_STREAM_PIECES = 4.0, 16
"""Seconds for which pieces are sent; and pieces that are sent however long it takes."""
SITE_TURN_S = 0.05
SAID_AGAIN_S = 10.0


Rate = Annotated[float, Field(gt=0)]


class MeasureOrder(WireRecord):
    """The first site has another measure the way to a third."""

    kind: Literal["measure"] = "measure"
    to: SiteName


class EchoRequest(WireRecord):
    """A message that is to be sent back."""

    kind: Literal["echo"] = "echo"


class EchoAnswer(WireRecord):
    """The message that is sent back."""

    kind: Literal["echoed"] = "echoed"


class ProbePiece(WireRecord):
    """Bytes, which lie behind the message."""

    kind: Literal["piece"] = "piece"
    last: bool


class PieceTaken(WireRecord):
    """A piece has come. With the last one: at which rate all did."""

    kind: Literal["taken"] = "taken"
    bytes_per_s: Rate | None


class WayMeasured(WireRecord):
    """The rate of the way to a site, for the first one."""

    kind: Literal["measured"] = "measured"
    to: SiteName
    bytes_per_s: Rate
    latency_s: Rate


class LinksMeasured(WireRecord):
    kind: Literal["links"] = "links"
    links: Annotated[tuple[SiteLink, ...], Field(min_length=1)]


class ProbeEnd(WireRecord):
    """The site has all links."""

    kind: Literal["bye"] = "bye"


FromProbe = (
    SiteHello | Refusal | Ping | MeasureOrder | EchoRequest | EchoAnswer | ProbePiece | PieceTaken | WayMeasured
    | LinksMeasured | ProbeEnd
)  # fmt: skip
FROM_PROBE: TypeAdapter[FromProbe] = TypeAdapter(Annotated[FromProbe, Field(discriminator="kind")], config=DEFERRED)


class LinkMeasurement(NamedTuple):
    """The measurement of one direction between two sites."""

    bytes_per_s: float
    latency_s: float


@dataclass
class _Stream:
    """The pieces that this site sends to measure the way to another."""

    to: str
    asked_s: float = 0.0
    """Time at which the message that is to come back was sent."""
    trips_s: list[float] = field(default_factory=list)
    sent: int = 0
    taken: int = 0
    began_s: float = 0.0
    ended: bool = False


class SitesProbe:
    """One site's part in the measurement."""

    def __init__(self, run: RunConfig, links: Links[FromProbe], say: Callable[[str], None]):
        self.names = [site.name for site in run.sites]
        self.me, self._links, self._say = run.site, links, say
        self.hellos: dict[str, SiteHello] = {}
        """The hello of each other site."""
        self._found: dict[tuple[str, str], LinkMeasurement] = {}
        self._stream: _Stream | None = None
        self._left = list(permutations(self.names, 2)) if self.me == self.names[0] else []
        self._measuring: tuple[str, str] | None = None
        self._done: set[str] = set()
        self._result: tuple[SiteLink, ...] = ()
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
            for name, message, _ in self._links.turn(SITE_TURN_S):
                self._hear(name, message)
            self._lead()
            self._send()
        return self._result

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
                self._links.tell(sender, MeasureOrder(to=to))
            return
        self._result = joined_links(self._found)
        self._links.tell_all(LinksMeasured(links=self._result))

    def _note(self, sender: str, to: str, bytes_per_s: float, latency_s: float) -> None:
        if self._measuring == (sender, to):
            self._found[sender, to] = LinkMeasurement(bytes_per_s, latency_s)
            self._measuring = None

    # ---- a pair ---------------------------------------------------------------------------------------------------

    def _begin(self, to: str) -> None:
        self._stream = _Stream(to, asked_s=time.monotonic())
        self._links.tell(to, EchoRequest())

    def _hear(self, name: str, message: FromProbe) -> None:
        stream = self._stream
        match message:
            case SiteHello():
                self.hellos[name] = message
                self._say(f"{name} is there")
            case MeasureOrder() if name == self.names[0]:
                self._begin(message.to)
            case EchoRequest():
                self._received.pop(name, None)
                self._links.tell(name, EchoAnswer())
            case EchoAnswer() if stream is not None and stream.to == name:
                self._echoed(stream)
            case ProbePiece():
                self._links.tell(name, PieceTaken(bytes_per_s=self._take(name, message.last)))
            case PieceTaken() if stream is not None and stream.to == name:
                stream.taken += 1
                if message.bytes_per_s is not None and stream.trips_s:
                    self._report(stream, message.bytes_per_s)
            case WayMeasured() if self.me == self.names[0]:
                self._note(name, message.to, message.bytes_per_s, message.latency_s)
            case LinksMeasured() if name == self.names[0]:
                self._result = message.links
                self._links.tell(name, ProbeEnd())
            case ProbeEnd():
                self._done.add(name)

    def _take(self, name: str, is_last: bool) -> float | None:
        """Count a piece. With the last one, return the rate from the first one's arrival to the last one's."""
        pieces, first_s = self._received.get(name, (0, time.monotonic()))
        self._received[name] = pieces + 1, first_s
        took_s = max(1e-6, time.monotonic() - first_s)
        return max(1, pieces) * len(PIECE) / took_s if is_last else None

    def _echoed(self, stream: _Stream) -> None:
        now = time.monotonic()
        stream.trips_s.append(now - stream.asked_s)
        stream.asked_s = now
        if len(stream.trips_s) < ECHOES:
            self._links.tell(stream.to, EchoRequest())
        else:
            stream.began_s = now

    def _send(self) -> None:
        """Send what may be on the way."""
        stream = self._stream
        while stream is not None and stream.began_s and not stream.ended and stream.sent - stream.taken < PIECES_AHEAD:
            stream.sent += 1
            stream.ended = stream.sent >= FEWEST_STREAM_PIECES and time.monotonic() - stream.began_s > STREAM_S
            self._links.tell(stream.to, ProbePiece(last=stream.ended), PIECE)

    def _report(self, stream: _Stream, bytes_per_s: float) -> None:
        latency_s = statistics.median(stream.trips_s) / 2
        self._stream = None
        if self.me == self.names[0]:
            self._note(self.me, stream.to, bytes_per_s, latency_s)
        else:
            found = WayMeasured(to=stream.to, bytes_per_s=bytes_per_s, latency_s=latency_s)
            self._links.tell(self.names[0], found)


def joined_links(found: Mapping[tuple[str, str], LinkMeasurement]) -> tuple[SiteLink, ...]:
    """Return each pair's link, of what was found in both directions: the slower rate, and the longer latency."""
    names = dict.fromkeys(sender for sender, _ in found)
    return tuple(
        SiteLink(
            sites=(a, b),
            bandwidth_bytes_per_s=four_digits(min(found[a, b].bytes_per_s, found[b, a].bytes_per_s)),
            latency_s=four_digits(max(found[a, b].latency_s, found[b, a].latency_s)),
        )
        for a, b in combinations(names, 2)
    )


def probe_links(run: RunConfig, file: Path, seconds: float, quiet: bool) -> Cluster:
    """Return the cluster of all sites of `run`, with the links between them measured; `run.site` is this one.

    file: the cluster's file of this site, which is a part of it. seconds: how long the others are waited for.
    Raises: UserError, RunFailed.
    """
    own = _own_part(run, file)
    check_addresses(run)
    home = (Path("runs") / run.name).absolute()
    home.mkdir(parents=True, exist_ok=True)
    open_at = open_links(run, run.site, home, FROM_PROBE)
    names = "\n".join(f"{site.name} {site.address}" for site in run.sites)
    identity = f"probe {hashlib.sha256(names.encode()).hexdigest()[:16]}"
    part = Cluster(groups=own.groups, network=own.network, measured=own.measured).model_dump_json(exclude_none=True)
    progress, refusals = Progress(enabled=not quiet), list[str]()
    hello = SiteHello(version=VERSION, site=run.site, run=identity, model="probe", cluster=part)

    def refused(who: str, why: str) -> None:
        refusals.append(f"{who} is not let in: {why}")
        progress.say(refusals[-1])

    with closing(open_at(lambda: hello, refused)) as links:
        probe = SitesProbe(run, links, progress.say)
        found = probe.measure(seconds, lambda: f"{refusals[-1]}. " if refusals else "")
    parts = {run.site: own} | {name: _part_of(name, hello) for name, hello in probe.hellos.items()}
    return joined(own, [site.name for site in run.sites], parts, found)


def _own_part(run: RunConfig, file: Path) -> Cluster:
    if not file.is_file():
        raise UserError(
            f"{file}: there is no such file. With --site, links are added to what a probe of this machine wrote. "
            "Give `argosy probe --run RUN.toml` first, or name its file with --out."
        )
    cluster = Cluster.load(file)
    if len(cluster.sites) > 1:
        if run.site not in cluster.sites:
            raise UserError(
                f"{file}: it has the sites {', '.join(cluster.sites)}, and not {run.site}. Name another with --out."
            )
        cluster = cluster.of_site(run.site)
    return cluster


def _part_of(name: str, hello: SiteHello) -> Cluster:
    try:
        return Cluster.model_validate_json(hello.cluster)
    except ValidationError as problem:
        raise RunFailed(
            f"{name} does not describe its devices as this version does ({problem}). Nothing was written."
        ) from None


def joined(own: Cluster, names: Sequence[str], parts: Mapping[str, Cluster], links: Sequence[SiteLink]) -> Cluster:
    """Return the cluster of all sites. Its `measured`, factors and software are those of `own`, one of `parts`.

    names: of the sites, in the order of the run file. parts: the cluster of each.
    """
    groups = tuple(group.model_copy(update={"site": name}) for name in names for group in parts[name].groups)
    site = next(name for name in names if parts[name] is own)
    at = {name: (parts[name].measured or Measurements()).model_copy(update={"site": name}) for name in names}
    return own.changed(
        name=" + ".join(names),
        groups=groups,
        network=_network([parts[name] for name in names]),
        links=tuple(links),
        measured=at[site],
        measured_at={name: at[name] for name in names if parts[name].measured is not None},
    )


def _network(parts: Sequence[Cluster]) -> tuple[NetworkTier, ...]:
    """Return the network of all sites: that of each if they are alike, else one level, as slow as the slowest."""
    alike = {(part.devices_per_node, part.network) for part in parts}
    if len(alike) == 1:
        return parts[0].network
    levels = [tier for part in parts for tier in part.tiers[1:]]
    if not levels:
        return ()
    rate, latency_s = min(tier.bytes_per_s for tier in levels), max(tier.latency_s for tier in levels)
    devices = max(part.devices for part in parts)
    return (NetworkTier(name="network", devices=devices, bandwidth_bytes_per_s=rate, latency_s=latency_s),)
