"""The run's secret: who knows it belongs to the run, and may speak to its processes on other machines."""

from __future__ import annotations

import hmac
import os
import secrets
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
