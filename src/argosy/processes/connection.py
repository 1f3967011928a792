"""A connection between processes of different machines: TCP, or TLS, that carries frames of bytes.

Nothing that comes is used before the other end has proven that it knows the run's secret (`secret`). Each frame is
marked with a keyed hash of its bytes and its number, so that none can be changed, added, repeated or left out on the
way; TLS with a certificate that follows from the secret does that by itself, for a fraction of the time
(benchmarks/transport.py). No call waits: what cannot be sent at once is kept and sent later.

A message is a class of its own (`WireRecord`), checked when it arrives. It travels as JSON. Bytes, where a message has
some, travel behind it, as its sender and its receiver frame them.
"""

from __future__ import annotations

import hmac
import resource
import selectors
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from argosy.errors import first_error
from argosy.processes.secret import PROOF_BYTES, Handshake, HandshakeFailed, Keys

Address = tuple[str, int]
"""Host and TCP port."""
BACKLOG = 4096
"""Connections that wait to be accepted: all processes of a large run come at once."""
CALL_TIMEOUT_S = 1.0
HELLO_S = 10.0
"""A connection that sends no hello within this time is closed."""
CONNECTION_RECEIVE_BYTES = 1 << 18
TURN_BYTES = 1 << 18
"""The most that is read in one turn: the others wait meanwhile."""
FRAME_BYTES = 1 << 20
"""The longest frame."""
OUTBOX_BYTES = 1 << 24
"""An end that lets this much pile up is treated as gone."""
UNSENT_BYTES = 1 << 17
"""Bytes that the kernel takes before it can send them: no urgent frame can overtake those."""
LENGTH = struct.Struct(">I")
SEQUENCE_NUMBER = struct.Struct(">Q")


class Connection:
    """One end. Its owner calls `take` whenever `selector` reports it, and looks at `problem` after every call."""

    def __init__(
        self,
        connected: socket.socket,
        handshake: Handshake,
        selector: selectors.BaseSelector,
        data: Any,
        tls: ssl.SSLContext | None = None,
        is_marked: bool = True,
    ):
        """Register with `selector`, which reports `data`.

        handshake: this end's part, not begun. tls: encrypts everything, the handshake included; of a client or of a
        server, as this end is. is_marked: False at both ends if nobody but those who know the secret has the key of the
        certificate. A socket that the other end has cut already raises nothing: `problem` says it.
        """
        self._socket, self._is_secured = connected, tls is None
        self._selector, self._data, self._interest = selector, data, selectors.EVENT_READ
        self._unread, self._unsent = bytearray(), bytearray()
        self._bulk: deque[bytes] = deque()
        self._bulk_bytes = 0
        self._wants_to_write = False
        self._keys: Keys | None = None
        self._mark_bytes = PROOF_BYTES if is_marked else 0
        self._received = self._sent = 0
        self.problem = ""
        """Why nothing more can be sent or received; empty while the connection works."""
        self.is_stranger = False
        """True if the problem is that the other end did not prove that it knows the secret."""
        self._handshake = handshake
        try:
            self._prepare(tls)
        except OSError as problem:  # TLS looks at the other end, which may be gone
            self.problem = str(problem)
            connected.close()
        else:
            self._advance(b"")
            self._attempt(self._flush)

    def _prepare(self, tls: ssl.SSLContext | None) -> None:
        """Set the socket's options, encrypt it, and have the selector report it. Raises: OSError."""
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        if tls is not None:
            is_server = tls.protocol == ssl.PROTOCOL_TLS_SERVER
            self._socket = tls.wrap_socket(self._socket, server_side=is_server, do_handshake_on_connect=False)
        self._selector.register(self._socket, selectors.EVENT_READ, self._data)

    @property
    def is_proven(self) -> bool:
        """True once each end has proven to the other that it knows the secret."""
        return self._keys is not None

    @property
    def unsent_bytes(self) -> int:
        """Bytes that were given to `send` and that the kernel has not taken yet."""
        return len(self._unsent) + self._bulk_bytes

    def send(self, frame: bytes, is_bulk: bool = False) -> None:
        """Send a frame of at most `FRAME_BYTES`, at once or later. Only after `is_proven`.

        is_bulk: later frames that are not may overtake it. On a thin link what is asked for and decided must not wait
        behind megabytes: each end would send in turn, and the link be idle in one direction.
        """
        assert self._keys is not None and len(frame) <= FRAME_BYTES
        if is_bulk:
            self._bulk.append(frame)
            self._bulk_bytes += len(frame)
        else:
            self._put(self._keys, frame)
        if self.unsent_bytes > OUTBOX_BYTES:
            self.problem = self.problem or "it accepts no more data"
        self._attempt(self._flush)

    def take(self) -> list[bytes]:
        """Return the frames that have come since the last call, as far as a turn's budget goes."""
        frames: list[bytes] = []
        self._attempt(partial(self._read, frames))
        self._attempt(self._flush)
        return frames

    def close(self) -> None:
        """End the conversation; what was not sent yet is lost."""
        self.problem = self.problem or "it is closed"
        if self._socket.fileno() >= 0:
            with suppress(KeyError):  # the selector may be closed already
                self._selector.unregister(self._socket)
            self._socket.close()

    # ---- bytes --------------------------------------------------------------------------------------------------

    def _attempt(self, action: Callable[[], None]) -> None:
        """Call `action`, which moves bytes, as far as the socket lets it."""
        if self.problem:
            return
        self._wants_to_write = False
        try:
            if not self._is_secured:
                self._socket.do_handshake()  # type: ignore[attr-defined]
                self._is_secured = True
            action()
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        except ssl.SSLWantWriteError:
            self._wants_to_write = True
        except HandshakeFailed as problem:
            self.problem, self.is_stranger = str(problem), True
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            self.problem = "the other end has closed"
        except ssl.SSLError as problem:
            self.problem, self.is_stranger = f"TLS: {problem.reason or problem}", not self.is_proven
        except OSError as problem:
            self.problem = str(problem)
        self._watch()

    def _watch(self) -> None:
        """Have the selector report what is wanted."""
        writes = self._wants_to_write or (self._is_secured and bool(self._unsent or self._bulk))
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
        if interest != self._interest and self._socket.fileno() >= 0:
            self._interest = interest
            self._selector.modify(self._socket, interest, self._data)

    def _put(self, keys: Keys, frame: bytes) -> None:
        """Mark a frame with its number, which says its place from now on."""
        mark = _mark(keys.sending, self._sent, frame) if self._mark_bytes else b""
        self._sent += 1
        self._unsent += LENGTH.pack(len(frame)) + mark + frame

    def _flush(self) -> None:
        while self._unsent or self._bulk:
            if not self._unsent and self._keys is not None:
                frame = self._bulk.popleft()
                self._bulk_bytes -= len(frame)
                self._put(self._keys, frame)
            sent = self._socket.send(memoryview(self._unsent)[:CONNECTION_RECEIVE_BYTES])
            del self._unsent[:sent]

    def _read(self, frames: list[bytes]) -> None:
        budget = TURN_BYTES
        while budget > 0 or self._pending():
            data = self._socket.recv(CONNECTION_RECEIVE_BYTES)
            if not data:
                raise ConnectionError("the other end has closed")
            budget -= len(data)
            self._unread += data
            self._use(frames)

    def _pending(self) -> int:
        """Return how many bytes TLS has decrypted already: no selector reports those."""
        return self._socket.pending() if isinstance(self._socket, ssl.SSLSocket) else 0

    def _use(self, frames: list[bytes]) -> None:
        """Take what is whole from the unread bytes. Raises: HandshakeFailed, ConnectionError."""
        while self._keys is None and len(self._unread) >= self._wanted:
            self._advance(self._cut(self._wanted))
        keys, at, head_bytes = self._keys, 0, LENGTH.size + self._mark_bytes
        if keys is None:
            return
        view = memoryview(self._unread)
        try:
            while len(view) - at >= head_bytes:
                (length,) = LENGTH.unpack_from(view, at)
                if length > FRAME_BYTES:
                    raise ConnectionError(f"a frame of {length} bytes, where {FRAME_BYTES} are the most")
                end = at + head_bytes + length
                if len(view) < end:
                    break
                frame = bytes(view[at + head_bytes : end])
                mark = _mark(keys.receiving, self._received, frame) if self._mark_bytes else b""
                if not hmac.compare_digest(mark, view[at + LENGTH.size : at + head_bytes]):
                    raise ConnectionError("a frame that the other end did not send")
                self._received, at = self._received + 1, end
                frames.append(frame)
        finally:
            view.release()
            del self._unread[:at]

    def _advance(self, received: bytes) -> None:
        """Go on with the handshake, with the bytes that it wanted."""
        self._wanted = 0
        try:
            while not self._wanted:
                to_send, self._wanted = self._handshake.send(received) if received else next(self._handshake)
                received = b""
                self._unsent += to_send
        except StopIteration as done:
            self._keys = done.value
        except HandshakeFailed:
            with suppress(OSError):  # the other end may not wait for its refusal
                self._flush()
            raise

    def _cut(self, size: int) -> bytes:
        first = bytes(self._unread[:size])
        del self._unread[:size]
        return first


def listener_of(address: Address, backlog: int = 16) -> socket.socket:
    """Listen at an address; at all of this machine's, of IPv4 and IPv6, if its host is "". Raises: OSError."""
    host, port = address
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(address, family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0] if host else socket.AF_INET
    return socket.create_server(address, family=family, backlog=backlog)


def call(address: Address) -> Future[socket.socket]:
    """Connect to `address` in a thread: where the network is down, even resolving the name takes long.

    The future raises OSError if nothing answers, UnicodeError if that can be no name.
    """
    connected: Future[socket.socket] = Future()

    def connect() -> None:
        try:
            connected.set_result(socket.create_connection(address, CALL_TIMEOUT_S))
        except (OSError, UnicodeError) as problem:  # the second: no such name is possible
            connected.set_exception(problem)

    try:
        threading.Thread(target=connect, name="argosy-call", daemon=True).start()
    except RuntimeError as problem:  # there can be no more threads: call again later
        connected.set_exception(OSError(str(problem)))
    return connected


def _mark(key: bytes, number: int, frame: bytes) -> bytes:
    return hmac.digest(key, SEQUENCE_NUMBER.pack(number) + frame, "sha256")


def raise_limit() -> None:
    """Let this process open as many files as the machine allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # where there is no limit, macOS allows no number
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


TEXT_CHARS = 20_000
"""Longer explanations, with what a program printed in them, are cut."""

Text = Annotated[str, BeforeValidator(lambda text: text[:TEXT_CHARS] if isinstance(text, str) else text)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
M = TypeVar("M")


class BadMessage(Exception):
    """A frame is no message, or one that nobody may send."""


class WireRecord(BaseModel):
    """Base of the messages and their parts."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


DEFERRED = ConfigDict(defer_build=True)
"""For the union of what one end may say: of both unions, a process builds the one that it hears, once it does."""


def encoded(message: WireRecord) -> bytes:
    """Return a message as JSON, without a line break in it."""
    return message.model_dump_json().encode()


def decoded(data: bytes, kinds: TypeAdapter[M]) -> M:
    """Return the message that `encoded` made of one of `kinds`. Raises: BadMessage."""
    try:
        return kinds.validate_json(data)
    except ValidationError as problem:
        raise BadMessage(first_error(problem)) from None
