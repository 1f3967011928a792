"""The run's secret: who knows it belongs to the run, and may speak to its processes on other machines.

The two ends of a connection prove to each other that they know it. Each end makes up a number for this connection alone
(a nonce), and answers the other's with a keyed hash of both (HMAC-SHA256, RFC 2104): challenge and response, as in
ISO/IEC 9798-4. What somebody recorded is of no use, since the numbers are new each time, and an answer cannot be sent
back to its author, since the two ends hash different words. From the same numbers follow two keys, one for each
direction, that mark everything the ends send from then on.

    listener -> caller: MAGIC, nonce
    caller -> listener: nonce, proof
    listener -> caller: proof, or zeros if the caller's was wrong

A caller that does not know the secret learns the version of the program, and nothing else.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from argosy.errors import UserError
from argosy.files import kept_text

VALUE, FILE = "ARGOSY_SECRET", "ARGOSY_SECRET_FILE"
"""Environment variables: the secret itself, or the path of a file that holds it."""
NAME = ".secret"
"""The file in the run's folder that holds it where neither is set."""
LEAST_CHARS = 32
"""A shorter one could be guessed from a recorded conversation."""
HOW_TO_MAKE_ONE = "Try: openssl rand -hex 32"
OTHERS = 0o077
"""The permission bits of everybody but the owner."""


def secret_of(run_dir: Path) -> bytes:
    """Return the run's secret: that of the environment, else the one in `run_dir`, which the first call makes.

    Raises: UserError if it is too short, cannot be read, or if others may read its file.
    """
    if value := os.environ.get(VALUE):
        return _checked(value, VALUE)
    if given := os.environ.get(FILE):
        return _read(Path(given), f"{FILE} = {given}")
    path = run_dir / NAME
    try:
        return kept_secret(path)
    except OSError as problem:
        raise UserError(
            f"{path}: the run's secret cannot be kept there ({problem}). Make the folder writable, or set {FILE}"
        ) from None


def kept_secret(path: Path) -> bytes:
    """Return the secret in a file that only its user may read, which the first call makes.

    Raises: OSError if it cannot be made; UserError as `secret_of`.
    """
    kept_text(path, lambda: secrets.token_hex(32) + "\n", mode=0o600)
    return _read(path, str(path))


def fingerprint_of(run_dir: Path) -> str:
    """Return a text from which the run's secret cannot be told, but whether two are the same; empty if it has none yet.

    Raises: as `secret_of`.
    """
    if not (os.environ.get(VALUE) or os.environ.get(FILE) or (run_dir / NAME).exists()):
        return ""
    return hmac.digest(secret_of(run_dir), b"fingerprint", "sha256").hex()


def fingerprint_in(run_dir: Path) -> str:
    """Return the fingerprint of the secret that a run's folder holds; empty if it holds none, or none that is valid."""
    try:
        secret = _read(run_dir / NAME, "")
    except UserError:
        return ""
    return hmac.digest(secret, b"fingerprint", "sha256").hex()


def _read(path: Path, named: str) -> bytes:
    try:
        mode, value = path.stat().st_mode, path.read_text()
    except (OSError, ValueError) as problem:
        raise UserError(f"{named}: the run's secret cannot be read ({problem}). {HOW_TO_MAKE_ONE} > {path}") from None
    if mode & OTHERS:
        raise UserError(
            f"{named}: others may read the run's secret (mode {mode & 0o777:04o}). Try: chmod 600 {path}; if others "
            "use this machine, delete the file instead, and a new one is made"
        )
    return _checked(value, named)


def _checked(value: str, named: str) -> bytes:
    if len(value.strip()) < LEAST_CHARS:
        raise UserError(f"{named}: the run's secret has fewer than {LEAST_CHARS} characters. {HOW_TO_MAKE_ONE}")
    return value.strip().encode()


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
