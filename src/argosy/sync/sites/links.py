"""The connections of one site's exchange to those of the others: who is let in, who is refused, who went silent.

Of two sites the later one in the run file calls the earlier one. Both prove that they know the run's secret before a
message counts, and say which run, model and version they are of.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Generic

from pydantic import TypeAdapter

from argosy.processes.connection import FRAME_BYTES, Address, Connection, call
from argosy.processes.messages import BadMessage, WireRecord
from argosy.processes.secret import call as called
from argosy.processes.secret import listen
from argosy.sync.sites.messages import M, SiteHello, SitePing, SiteRefused, packed, unpacked

PING_S = 1.0
SILENT_S = 10.0
"""A site that says nothing for this long is not connected any more: a link that was cut does not say so."""
HELLO_S = 10.0
AGAIN_S, REFUSED_AGAIN_S = 1.0, 5.0
"""How long after a failed call the next one is made; and after a refusal."""
MOST_STRANGERS = 16
"""Connections that have not said who they are."""
MOST_REFUSALS = 256
"""So many refusals are told, each once; a run lasts for months, and whoever reaches the port can be refused."""
SAME_KEYS = "all sites need the same secret (ARGOSY_SECRET_FILE) and the same sync.tls"
Hello = Callable[[], SiteHello]
"""Returns what this site says of itself."""
Refused = Callable[[str, str], None]
"""Hears who was refused, here or there, and why."""


class Link:
    """One connection. `name`: the site at the other end, once it has said it."""

    def __init__(self, connected: socket.socket, where: str, name: str, links: Links[M]):
        self.where, self.name, self.expected = where, "", name
        self.since_s = self.heard_s = time.monotonic()
        self.has_said_hello = False
        if name:
            self.connection = Connection(connected, called(links.secret), links.selector, self, links.client_tls)
        else:
            self.connection = Connection(connected, listen(links.secret), links.selector, self, links.server_tls)

    def send(self, message: WireRecord, data: bytes = b"") -> None:
        """Send a message, at once or later."""
        frame = packed(message, data)
        assert len(frame) <= FRAME_BYTES
        self.connection.send(frame, is_bulk=bool(data))


class Links(Generic[M]):
    """All connections of a site."""

    def __init__(
        self,
        me: str,
        addresses: Mapping[str, Address],
        listener: socket.socket,
        secret: bytes,
        tls: tuple[ssl.SSLContext, ssl.SSLContext] | None,
        kinds: TypeAdapter[M],
        hello: Hello,
        refused: Refused,
    ):
        """addresses: of all sites, in order. tls: what encrypts the end that calls, and the one that is called.

        kinds: the messages that sites send each other, with `SiteHello`, `SiteRefused` and `SitePing`. refused: called
        once for each reason, of who is called by name or by host.
        """
        self.me, self.secret, self._kinds, self._hello, self._refused = me, secret, kinds, hello, refused
        self._told: set[tuple[str, str]] = set()
        self.client_tls: ssl.SSLContext | None = None if tls is None else tls[0]
        self.server_tls: ssl.SSLContext | None = None if tls is None else tls[1]
        names = list(addresses)
        self._dials = {name: addresses[name] for name in names[: names.index(me)]}
        self._awaits = set(names[names.index(me) + 1 :])
        self._calls: dict[str, Future[socket.socket]] = {}
        self._next_call_s = dict.fromkeys(self._dials, 0.0)
        self.selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._listener = listener
        self.selector.register(listener, selectors.EVENT_READ)
        self._links: list[Link] = []
        self.sites: dict[str, Link] = {}
        """The connected ones."""
        self.heard_s: dict[str, float] = dict.fromkeys((n for n in names if n != me), time.monotonic())
        """When each was heard last; at the beginning, now."""
        self._pinged_s = 0.0

    def turn(self, timeout_s: float) -> list[tuple[str, M, bytes]]:
        """Wait for something to happen, up to `timeout_s`. Return what the sites said: a `SiteHello` comes first."""
        heard: list[tuple[str, M, bytes]] = []
        for key, _ in self.selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data in self._links:
                heard += self._hear(key.data)
        self._call()
        self._look_after(time.monotonic())
        return heard

    def tell(self, name: str, message: WireRecord, data: bytes = b"") -> None:
        """Send a site a message, if it is connected."""
        if (link := self.sites.get(name)) is not None:
            link.send(message, data)

    def tell_all(self, message: WireRecord) -> None:
        """Send all connected sites a message."""
        for name in list(self.sites):
            self.tell(name, message)

    def refuse(self, name: str, why: str) -> None:
        """End the connection to a site that says what it must not."""
        if (link := self.sites.get(name)) is not None:
            self._refuse(link, why)

    def close(self) -> None:
        """End all of them."""
        for link in list(self._links):
            self._drop(link)
        self.selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            connected, (host, *_) = self._listener.accept()
        except OSError:
            return
        strangers = [link for link in self._links if not link.name and not link.expected]
        if len(strangers) >= MOST_STRANGERS:
            self._drop(strangers[0])
        self._begin(Link(connected, host, "", self))  # each connection has a port of its own

    def _call(self) -> None:
        now = time.monotonic()
        under_way = {link.expected for link in self._links}
        for name, address in self._dials.items():
            if name in self._calls:
                if self._calls[name].done():
                    answered = self._calls.pop(name)
                    self._next_call_s[name] = now + AGAIN_S
                    if answered.exception() is None:
                        self._begin(Link(answered.result(), address[0], name, self))
            elif name not in under_way and now >= self._next_call_s[name]:
                self._calls[name] = call(address)

    def _begin(self, link: Link) -> None:
        self._links.append(link)

    def _hear(self, link: Link) -> list[tuple[str, M, bytes]]:
        frames = link.connection.take()
        if link.connection.is_proven and not link.has_said_hello and not link.connection.problem:
            link.has_said_hello = True
            link.send(self._hello())
        heard: list[tuple[str, M, bytes]] = []
        for frame in frames:
            link.heard_s = time.monotonic()
            try:
                message, data = unpacked(frame, self._kinds)
            except BadMessage as problem_of_it:
                self._refuse(link, f"what it says is no message ({problem_of_it})")
                return heard
            if (problem := self._problem(link, message)) is not None:
                self._refuse(link, problem)
                return heard
            if not isinstance(message, SitePing):
                heard.append((link.name, message, data))
            self.heard_s[link.name] = link.heard_s
        return heard

    def _problem(self, link: Link, message: M) -> str | None:
        """Admit the site that says hello, or return why it is not admitted, or is no longer heard."""
        if isinstance(message, SiteRefused):
            return f"it refuses this site: {message.why}"
        if link.name:
            return None
        if not isinstance(message, SiteHello):
            return "it says no hello"
        return _of_another_run(self._hello(), message) or self._admit(link, message.site)

    def _admit(self, link: Link, name: str) -> str | None:
        if name != link.expected and (link.expected or name not in self._awaits):
            return f'it says that it is the site "{name}", which is not expected there'
        if (old := self.sites.pop(name, None)) is not None:
            self._drop(old)
        link.name = name
        self.sites[name] = link
        return None

    def _refuse(self, link: Link, why: str) -> None:
        if not why.startswith("it refuses") and link.connection.is_proven:
            link.send(SiteRefused(why=why))
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
            self.tell_all(SitePing())
        for link in list(self._links):
            if link.connection.problem:
                if link.connection.is_stranger:
                    self._refuse(link, f"{link.connection.problem}; {SAME_KEYS}")
                else:
                    self._drop(link)
            elif now - link.heard_s > (SILENT_S if link.name else HELLO_S):
                self._drop(link)

    def _drop(self, link: Link) -> None:
        link.connection.close()
        if link in self._links:
            self._links.remove(link)
        if self.sites.get(link.name) is link:
            del self.sites[link.name]


def _of_another_run(mine: SiteHello, its: SiteHello) -> str | None:
    if its.version != mine.version:
        return f"it speaks version {its.version} of the exchange, and this site {mine.version}: use one version"
    if its.model != mine.model:
        return f"it trains another model ({its.model}, here {mine.model}): use the same model section"
    if its.run != mine.run:
        return (
            f"it is of another run ({its.run}, here {mine.run}): all sites need the same run file, with "
            "the same train.steps, seed, data, batches, optimizer and sync, that of the plan too"
        )
    return None
