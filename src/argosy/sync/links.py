"""The connections between parts of a run on different machines: exchanges of sites, probes, parameter servers, workers.

Of two parts the later one calls the earlier one. Both prove that they know the run's secret before a message counts,
and say which run, model and version they are of; who is of another is refused, and told why. TLS has a certificate that
follows from the secret: whoever knows the secret has the same key and the same certificate, byte for byte, so that
nothing has to be brought from one machine to another but the secret (Ed25519, whose signatures are deterministic,
RFC 8032). A site's exchange keeps a table of the others (`PeerTable`).
"""

from __future__ import annotations

import datetime
import errno
import hmac
import os
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Generic

from pydantic import TypeAdapter

from argosy.config.launch import host_and_port, interface_of
from argosy.config.schema import RunConfig
from argosy.errors import UserError, imported
from argosy.processes.connection import (
    FRAME_BYTES,
    HELLO_S,
    Address,
    BadMessage,
    Connection,
    WireRecord,
    call,
    listener_of,
)
from argosy.processes.secret import Certificate, listen, secret_of, self_signed
from argosy.processes.secret import call as called
from argosy.sync.layout import Sites
from argosy.sync.messages import FromSite, Hello, M, Ping, Refusal, SiteProgress, framed, unframed

CERTIFICATE_FROM, CERTIFICATE_UNTIL = (
    datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
    datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC),
)
"""Validity of the certificate, which is part of what must be the same everywhere."""
BIND_S, BIND_AGAIN_S = 10.0, 0.2
"""A port is tried for this long: the process that had it before may not have let go of it."""
PING_S = 1.0
PEER_SILENT_S = 10.0
"""A peer that says nothing for this long is not connected any more: a link that was cut does not say so."""
LINK_AGAIN_S, REFUSED_AGAIN_S = 1.0, 5.0
"""Seconds from a failed call to the next one; and from a refusal."""
CALL_LOOK_S = 0.02
"""Seconds between two looks after a call that is under way."""
MOST_UNKNOWN_SITES = 16
"""Most connections without a hello."""
MOST_REFUSALS = 256
"""Most refusals that are reported, each once: a run lasts for months, and anything may reach the port."""
SAME_KEYS = "all sites need the same secret (ARGOSY_SECRET_FILE) and the same sync.tls"
REFUSED_THERE = "it refuses this site: "
"""Precedes what another part gives as its reason."""
Tls = tuple[ssl.SSLContext, ssl.SSLContext]
"""TLS of the end that calls, and of the end that is called."""
SayHello = Callable[[], Hello]
"""Returns what this part says of itself."""
Refused = Callable[[str, str], None]
"""Called with the part that was refused, or that refuses (`REFUSED_THERE`), and why."""


class Link:
    """One connection. `name`: the part at the other end, once it has said it."""

    def __init__(self, connected: socket.socket, where: str, name: str, links: Links[M]):
        self.where, self.name, self.expected = where, "", name
        self.since_s = self.heard_s = time.monotonic()
        self.has_said_hello = False
        handshake, tls = (called, links.client_tls) if name else (listen, links.server_tls)
        self.connection = Connection(connected, handshake(links.secret), links.selector, self, tls, tls is None)

    def send(self, message: WireRecord, data: bytes | memoryview = b"") -> None:
        frame = framed(message, data)
        assert len(frame) <= FRAME_BYTES
        self.connection.send(frame, is_bulk=bool(data))


class Links(Generic[M]):
    """All connections of one part of a run."""

    def __init__(
        self,
        me: str,
        addresses: Mapping[str, Address | None],
        listener: socket.socket | None,
        secret: bytes,
        tls: Tls | None,
        kinds: TypeAdapter[M],
        hello: SayHello,
        refused: Refused,
    ):
        """addresses: of all parts, in order; None: of one that only calls. listener: None if this one does.

        kinds: the messages of the parts, with a `Hello`, `Refusal` and `Ping`. refused: called once for each reason, of
        who is called by name or by host.
        """
        self.me, self.secret, self._kinds, self._hello, self._refused = me, secret, kinds, hello, refused
        self._told: set[tuple[str, str]] = set()
        self.client_tls: ssl.SSLContext | None
        self.server_tls: ssl.SSLContext | None
        self.client_tls, self.server_tls = tls or (None, None)
        names = list(addresses)
        earlier, later = names[: names.index(me)], names[names.index(me) + 1 :]
        self._dials = {name: address for name in earlier if (address := addresses[name]) is not None}
        self._awaits = set(later if listener is not None else ())
        self._calls: dict[str, Future[socket.socket]] = {}
        self._next_call_s = dict.fromkeys(self._dials, 0.0)
        self.selector = selectors.DefaultSelector()
        self._listener = listener
        if listener is not None:
            listener.setblocking(False)
            self.selector.register(listener, selectors.EVENT_READ)
        self._links: list[Link] = []
        self.sites: dict[str, Link] = {}
        """The connected ones."""
        self.heard_s: dict[str, float] = dict.fromkeys((n for n in names if n != me), time.monotonic())
        """The time at which each was heard last; at first, that of the start."""
        self._pinged_s = 0.0

    def turn(self, timeout_s: float) -> list[tuple[str, M, bytes]]:
        """Wait for something to happen, up to `timeout_s`. Return what the others said: a `Hello` comes first."""
        heard: list[tuple[str, M, bytes]] = []
        for key, _ in self.selector.select(min(timeout_s, CALL_LOOK_S) if self._calls else timeout_s):
            if self._listener is not None and key.fileobj is self._listener:
                self._accept(self._listener)
            elif key.data in self._links:
                heard += self._hear(key.data)
        self._call()
        self._look_after(time.monotonic())
        return heard

    def tell(self, name: str, message: WireRecord, data: bytes | memoryview = b"") -> None:
        """Send a message, at once or later, if `name` is connected."""
        if (link := self.sites.get(name)) is not None:
            link.send(message, data)

    def unsent_bytes(self, name: str) -> int:
        return self.sites[name].connection.unsent_bytes if name in self.sites else 0

    def tell_all(self, message: WireRecord) -> None:
        for name in list(self.sites):
            self.tell(name, message)

    def refuse(self, name: str, why: str) -> None:
        """End the connection to a part that says what it must not."""
        if (link := self.sites.get(name)) is not None:
            self._refuse(link, why)

    def close(self) -> None:
        for link in list(self._links):
            self._drop(link)
        self.selector.close()
        if self._listener is not None:
            self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connected, (host, *_) = listener.accept()
        except OSError:  # no descriptor is left, or the other end is gone already
            time.sleep(CALL_LOOK_S)  # else this process would spin: the caller is still there
            return
        strangers = [link for link in self._links if not link.name and not link.expected]
        if len(strangers) >= MOST_UNKNOWN_SITES:
            self._drop(strangers[0])
        self._links.append(Link(connected, host, "", self))  # each connection has a port of its own

    def _call(self) -> None:
        now = time.monotonic()
        under_way = {link.expected for link in self._links}
        for name, address in self._dials.items():
            if name in self._calls:
                if self._calls[name].done():
                    answered = self._calls.pop(name)
                    self._next_call_s[name] = now + LINK_AGAIN_S
                    if answered.exception() is None:
                        self._links.append(Link(answered.result(), address[0], name, self))
            elif name not in under_way and now >= self._next_call_s[name]:
                self._calls[name] = call(address)

    def _hear(self, link: Link) -> list[tuple[str, M, bytes]]:
        frames = link.connection.take()
        if link.connection.is_proven and not link.has_said_hello and not link.connection.problem:
            link.has_said_hello = True
            link.send(self._hello())
        heard: list[tuple[str, M, bytes]] = []
        for frame in frames:
            link.heard_s = time.monotonic()
            try:
                message, data = unframed(frame, self._kinds)
            except BadMessage as problem_of_it:
                self._refuse(link, f"it sent an invalid message ({problem_of_it})")
                return heard
            if (problem := self._problem(link, message)) is not None:
                self._refuse(link, problem)
                return heard
            if not isinstance(message, Ping):
                heard.append((link.name, message, data))
            self.heard_s[link.name] = link.heard_s
        return heard

    def _problem(self, link: Link, message: M) -> str | None:
        """Admit the part that says hello, or return why it is not admitted, or is no longer heard."""
        if isinstance(message, Refusal):
            return REFUSED_THERE + message.why
        if link.name:
            return None
        if not isinstance(message, Hello):
            return "it sent no hello"
        return _of_another_run(self._hello(), message) or self._admit(link, message.site)

    def _admit(self, link: Link, name: str) -> str | None:
        if name != link.expected and (link.expected or name not in self._awaits):
            return f'it calls itself the site "{name}", which is not expected there'
        if (old := self.sites.pop(name, None)) is not None:
            self._drop(old)
        link.name = name
        self.sites[name] = link
        return None

    def _refuse(self, link: Link, why: str) -> None:
        if not why.startswith(REFUSED_THERE) and link.connection.is_proven:
            link.send(Refusal(why=why))
        who = link.name or link.expected or link.where
        if (who, why) not in self._told and len(self._told) < MOST_REFUSALS:
            self._told.add((who, why))
            self._refused(who, why)
        if link.expected:
            self._next_call_s[link.expected] = time.monotonic() + REFUSED_AGAIN_S
        self._drop(link)

    def _look_after(self, now: float) -> None:
        if now - self._pinged_s > PING_S:
            self._pinged_s = now
            self.tell_all(Ping())
        for link in list(self._links):
            if link.connection.problem:
                if link.connection.is_stranger:
                    self._refuse(link, f"{link.connection.problem}; {SAME_KEYS}")
                else:
                    self._drop(link)
            elif now - link.heard_s > (PEER_SILENT_S if link.name else HELLO_S):
                self._drop(link)

    def _drop(self, link: Link) -> None:
        link.connection.close()
        if link in self._links:
            self._links.remove(link)
        if self.sites.get(link.name) is link:
            del self.sites[link.name]


def _of_another_run(mine: Hello, its: Hello) -> str | None:
    if its.version != mine.version:
        return f"it speaks version {its.version} of the exchange, and this site {mine.version}: use one version"
    if its.model != mine.model:
        return (
            f"it trains another model ({its.model}, here {mine.model}): all sites need the same model section, and as "
            "many parameter servers"
        )
    if its.run != mine.run:
        return (
            f"it is of another run ({its.run}, here {mine.run}): all sites need the same run file, with "
            "the same train.steps, seed, data, batches, optimizer and sync, that of the plan too"
        )
    return None


def keys_of(run: RunConfig, folder: Path) -> tuple[bytes, Tls | None]:
    """Return the secret of the run in `folder`, and what encrypts its connections, if sync.tls asks for that.

    Raises: UserError.
    """
    secret = secret_of(folder)
    return secret, contexts(secret) if run.sync.tls else None


def contexts(secret: bytes) -> Tls:
    """Return what encrypts connections of the run with this secret. Raises: UserError without `cryptography`."""
    certificate, key = site_certificate(secret)
    with TemporaryDirectory(prefix="argosy-") as folder:  # mode 0700; OpenSSL reads keys from files only
        pair = Certificate(Path(folder) / "certificate.pem", Path(folder) / "key.pem")
        pair.write(certificate, key)
        return pair.context(is_server=False), pair.context(is_server=True)


def site_certificate(secret: bytes) -> tuple[bytes, bytes]:
    """Return the certificate and the key that follow from a secret, as PEM."""
    ed25519 = imported("cryptography.hazmat.primitives.asymmetric.ed25519", "tls", "sync.tls = true")
    key = ed25519.Ed25519PrivateKey.from_private_bytes(hmac.digest(secret, b"key between sites", "sha256"))
    return self_signed(key, "argosy sites", 1, CERTIFICATE_FROM, CERTIFICATE_UNTIL, None)


def listener_at(
    who: str,
    key: str,
    address: Address,
    wait_s: float,
    is_ending: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda _: None,
) -> socket.socket | None:
    """Listen at the port of `address`, on all interfaces unless it is this machine's own; None once `is_ending`.

    who, key: the part that listens, and the key of the run file that has its address, for messages. wait_s: how long a
    port that is in use is waited for; `say` is told. Raises: UserError.
    """
    host, port = address
    until, is_said = time.monotonic() + wait_s, False
    while not is_ending():
        try:
            return listener_of((interface_of(host), port))
        except OSError as problem:
            if problem.errno != errno.EADDRINUSE or time.monotonic() > until:
                raise UserError(
                    f"{key}: {who} cannot listen at {host}:{port} ({os.strerror(problem.errno or 0)}). Is the run "
                    "training there already? Else end the program that has the port, or give another address."
                ) from None
        if not is_said:
            is_said = True
            say(f" port {port} is in use; waiting for up to {wait_s:.0f} s")
        time.sleep(BIND_AGAIN_S)
    return None


def open_links(run: RunConfig, me: str, folder: Path, kinds: TypeAdapter[M]) -> Callable[[SayHello, Refused], Links[M]]:
    """Listen where the site `me` is called, and return what makes its `Links`. Raises: UserError.

    folder: where the secret of the run is. kinds: the messages of the sites.
    """
    secret, tls = keys_of(run, folder)
    addresses = {site.name: host_and_port(site.address) for site in run.sites}
    listener = listener_at(me, "sites", addresses[me], BIND_S)
    return partial(Links, me, addresses, listener, secret, tls, kinds)


BEHIND = 1
"""Rounds that a site's ranks may be behind when a round is decided, and be dealt samples of the next one."""


class PeerTable:
    """The other sites, as one of them sees them."""

    def __init__(self, sites: Sites, links: Links[FromSite]):
        self._sites, self._links = sites, links
        self._standings: dict[str, SiteProgress] = {}
        self.apart: set[str] = set()
        """Sites that have gone on without this one, and otherwise."""

    def note(self, name: str, standing: SiteProgress) -> None:
        self._standings[name] = standing

    def standing(self, name: str) -> SiteProgress:
        return self._standings.get(name, SiteProgress())

    def is_connected(self, name: str) -> bool:
        """Return True if the site can be spoken to; a site always can speak to itself."""
        return name == self._sites.me or name in self._links.sites

    def is_alive(self, name: str) -> bool:
        """Return True if the site was heard within sync.patience_s."""
        if self.is_connected(name):
            return True
        return time.monotonic() - self._links.heard_s[name] < self._sites.run.sync.patience_s

    def together(self, names: Sequence[str]) -> list[str]:
        """Return the sites of the largest group in which all are connected with each other, as one end of a link says.

        Each group begins with one of `names`, and takes every further one that goes with it.
        """
        groups = []
        for first in names:
            group = [first]
            for name in names:
                if name != first and all(self._are_connected(name, other) for other in group):
                    group.append(name)
            groups.append([name for name in names if name in group])
        return max(groups, key=len, default=[])

    def _are_connected(self, one: str, other: str) -> bool:
        if self._sites.me in (one, other):
            return self.is_connected(one) and self.is_connected(other)
        return other in self.standing(one).connected or one in self.standing(other).connected

    def leader(self, number: int) -> str:
        return next(name for name in self._sites.names if name == self._sites.me or self._may_lead(name, number))

    def _may_lead(self, name: str, number: int) -> bool:
        its = self._standings.get(name)
        is_behind = its is not None and (its.rounds < number or its.adopts)
        return self.is_alive(name) and not is_behind and name not in self.apart

    def is_near(self, name: str, number: int, mine: SiteProgress) -> bool:
        """Return True if a site's ranks have nearly come to round `number`. mine: where this site stands."""
        reached = mine.reached if name == self._sites.me else self.standing(name).reached
        return self.is_connected(name) and name not in self.apart and reached >= number - BEHIND

    def holder(self, number: int) -> str | None:
        """Return a connected site that has the average of round `number`."""
        here = (name for name in self._links.sites if name not in self.apart)
        return next((name for name in here if self.standing(name).rounds > number), None)
