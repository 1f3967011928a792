"""The handshake with which the two ends of a connection prove to each other that they know the run's secret.

Each end makes up a number for this connection alone (a nonce), and answers the other's with a keyed hash of both
(HMAC-SHA256, RFC 2104): challenge and response, as in ISO/IEC 9798-4. What somebody recorded is of no use, since the
numbers are new each time, and an answer cannot be sent back to its author, since the two ends hash different words.
From the same numbers follow two keys, one for each direction, that mark everything the ends send from then on.

    listener -> caller: MAGIC, nonce
    caller -> listener: nonce, proof
    listener -> caller: proof, or zeros if the caller's was wrong

A caller that does not know the secret learns the version of the program, and nothing else.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Generator
from dataclasses import dataclass

MAGIC = b"ARGOSY02"
"""Names the program, and the version of what it speaks."""
NONCE_BYTES = PROOF_BYTES = 32
REFUSED = bytes(PROOF_BYTES)


@dataclass(frozen=True)
class Keys:
    """The keys of one connection, each 32 bytes."""

    sending: bytes
    receiving: bytes


class Stranger(Exception):
    """The other end does not know the secret, or does not speak this language."""


Handshake = Generator[tuple[bytes, int], bytes, Keys]
"""Yields what to send, and how many bytes to send it back of what then comes; returns the keys. Raises: Stranger."""


def listen(secret: bytes) -> Handshake:
    """The handshake of the end that was called."""
    mine = secrets.token_bytes(NONCE_BYTES)
    answer = yield MAGIC + mine, NONCE_BYTES + PROOF_BYTES
    both = mine + answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], _hash(secret, "proof of the caller", both)):
        yield REFUSED, 0
        raise Stranger("it does not know this run's secret")
    yield _hash(secret, "proof of the listener", both), 0
    return Keys(_hash(secret, "key of the listener", both), _hash(secret, "key of the caller", both))


def call(secret: bytes) -> Handshake:
    """The handshake of the end that calls."""
    greeting = yield b"", len(MAGIC) + NONCE_BYTES
    if not greeting.startswith(MAGIC):
        raise Stranger("what answers there is not argosy, or another version of it")
    mine = secrets.token_bytes(NONCE_BYTES)
    both = greeting[len(MAGIC) :] + mine
    proof = yield mine + _hash(secret, "proof of the caller", both), PROOF_BYTES
    if not hmac.compare_digest(proof, _hash(secret, "proof of the listener", both)):
        raise Stranger("what answers there does not know this run's secret")
    return Keys(_hash(secret, "key of the caller", both), _hash(secret, "key of the listener", both))


def _hash(secret: bytes, purpose: str, nonces: bytes) -> bytes:
    return hmac.digest(secret, purpose.encode() + nonces, "sha256")
