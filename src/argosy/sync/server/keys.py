"""The keys with which servers and workers prove themselves to each other and encrypt: CURVE, from the run's secret.

CURVE (CurveZMQ, ZeroMQ RFC 26) is Curve25519 with XSalsa20-Poly1305. Whoever knows the secret derives both key pairs:
a worker knows the servers' public key, and servers let in the workers' alone, before a byte of a message is read. The
first server, which the other servers obey, proves itself to them with a key pair of its own.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from argosy.errors import missing_extra
from argosy.sync.server.messages import PIECE_BYTES

if TYPE_CHECKING:
    import zmq

HEARTBEAT_MS = 2000
"""ZeroMQ itself asks a silent connection for a sign of life so often."""


@dataclass(frozen=True)
class KeyPair:
    """Both as Z85 text."""

    public: bytes
    secret: bytes

    @classmethod
    def of(cls, secret: bytes, who: Literal["server", "worker", "first"]) -> KeyPair:
        """Return the pair of all servers, of all workers, or of the first server where it tells the others what to do,
        of the run with this secret. Raises: UserError."""
        lib = zeromq()
        from zmq.utils import z85

        private = z85.encode(hmac.digest(secret, f"CURVE key of a {who}".encode(), "sha256"))
        return cls(lib.curve_public(private), private)


def zeromq() -> Any:
    """Return the module `zmq`. Raises: UserError if it is not installed, or cannot encrypt."""
    try:
        import zmq
    except ImportError:
        raise missing_extra("pyzmq", "async", "plan.sync = async") from None
    if not zmq.has("curve"):
        raise missing_extra("pyzmq with libsodium", "async", "plan.sync = async")
    return zmq


class AllowedKeys:
    """Lets in who has the workers' key, or that of the first server (ZeroMQ RFC 27, ZAP)."""

    def __init__(self, *public: bytes):
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Return True for a key that is let in."""
        return any(hmac.compare_digest(key, one) for one in self._public)


def settle(socket: zmq.Socket[bytes]) -> None:
    """Set what all sockets of a run have alike: how large a message may be, not how many wait; signs of life."""
    lib = zeromq()
    socket.setsockopt(lib.LINGER, 0)
    socket.setsockopt(lib.SNDHWM, 0)
    socket.setsockopt(lib.RCVHWM, 0)
    socket.setsockopt(lib.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(lib.HEARTBEAT_TIMEOUT, 10 * HEARTBEAT_MS)
    socket.setsockopt(lib.IPV6, 1)
    socket.setsockopt(lib.MAXMSGSIZE, 2 * PIECE_BYTES)
