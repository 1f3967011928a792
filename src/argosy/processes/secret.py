"""The run's secret, and TLS: a process that knows the secret may speak to the run's processes on other machines.

The two ends of a connection prove to each other that they know it. Each end makes up a number for this connection alone
(a nonce), and answers the other's with a keyed hash of both (HMAC-SHA256, RFC 2104): challenge and response, as in
ISO/IEC 9798-4. What somebody recorded is of no use, since the numbers are new each time, and an answer cannot be sent
back to its author, since the two ends hash different words. From the same numbers follow two keys, one for each
direction, that mark everything the ends send from then on.

    listener -> caller: HELLO_MAGIC, nonce
    caller -> listener: nonce, proof
    listener -> caller: proof, or zeros if the caller's was wrong

A caller that does not know the secret learns the version of the program, and nothing else.

With TLS both ends show the same certificate, and accept no other: the user's, or one that is made for the run and kept
in its folder. TLS encrypts; the secret settles, inside of it, which process may speak.
"""

from __future__ import annotations

import datetime
import hmac
import os
import secrets
import ssl
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from argosy.config.launch import LaunchConfig
from argosy.errors import UserError, imported
from argosy.files import kept_text, open_regular

SECRET_VARIABLE, SECRET_FILE_VARIABLE = "ARGOSY_SECRET", "ARGOSY_SECRET_FILE"
"""Environment variables: the secret itself, or the path of a file that holds it."""
SECRET_FILE = ".secret"
"""The file in the run's folder that holds it where neither is set."""
MOST_SECRET_BYTES = 2**16
LEAST_CHARS = 32
"""A shorter one could be guessed from a recorded conversation."""
HOW_TO_MAKE_ONE = "Try: openssl rand -hex 32"
OTHERS_BITS = 0o077
"""The permission bits of everybody but the owner."""


def secret_of(run_dir: Path) -> bytes:
    """Return the run's secret: that of the environment, else the one in `run_dir`, which the first call makes.

    Raises: UserError if it is too short, cannot be read, or if others may read its file.
    """
    if value := os.environ.get(SECRET_VARIABLE):
        return _checked(value, SECRET_VARIABLE)
    if given := os.environ.get(SECRET_FILE_VARIABLE):
        return _read(Path(given), f"{SECRET_FILE_VARIABLE} = {given}")
    path = run_dir / SECRET_FILE
    try:
        return kept_secret(path)
    except OSError as problem:
        raise UserError(
            f"{path}: the run's secret cannot be kept there ({problem}). Make the folder writable, or set "
            f"{SECRET_FILE_VARIABLE}"
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
    if not (
        os.environ.get(SECRET_VARIABLE) or os.environ.get(SECRET_FILE_VARIABLE) or (run_dir / SECRET_FILE).exists()
    ):
        return ""
    return hmac.digest(secret_of(run_dir), b"fingerprint", "sha256").hex()


def fingerprint_in(run_dir: Path) -> str:
    """Return the fingerprint of the secret that a run's folder holds; empty if it holds none, or none that is valid."""
    try:
        secret = _read(run_dir / SECRET_FILE, "")
    except UserError:
        return ""
    return hmac.digest(secret, b"fingerprint", "sha256").hex()


def _read(path: Path, named: str) -> bytes:
    try:
        with open_regular(path) as file:
            mode, value = os.fstat(file.fileno()).st_mode, file.read(MOST_SECRET_BYTES).decode()
    except (OSError, ValueError) as problem:
        raise UserError(f"{named}: the run's secret cannot be read ({problem}). {HOW_TO_MAKE_ONE} > {path}") from None
    if mode & OTHERS_BITS:
        raise UserError(
            f"{named}: others may read the run's secret (mode {mode & 0o777:04o}). Try: chmod 600 {path}; if others "
            "use this machine, delete the file instead, and a new one is made"
        )
    return _checked(value, named)


def _checked(value: str, named: str) -> bytes:
    if len(value.strip()) < LEAST_CHARS:
        raise UserError(f"{named}: the run's secret has fewer than {LEAST_CHARS} characters. {HOW_TO_MAKE_ONE}")
    return value.strip().encode()


HELLO_MAGIC = b"ARGOSY02"
"""Names the program, and the version of what it speaks."""
NONCE_BYTES = PROOF_BYTES = 32
REFUSED_PROOF = bytes(PROOF_BYTES)


@dataclass(frozen=True)
class Keys:
    """The keys of one connection, each 32 bytes."""

    sending: bytes
    receiving: bytes


class HandshakeFailed(Exception):
    """The other end does not know the secret, or does not speak this language."""


Handshake = Generator[tuple[bytes, int], bytes, Keys]
"""Yields what to send, and how many bytes to send it back of what then comes; returns the keys.

Raises: HandshakeFailed."""


def listen(secret: bytes) -> Handshake:
    """The handshake of the end that was called."""
    mine = secrets.token_bytes(NONCE_BYTES)
    answer = yield HELLO_MAGIC + mine, NONCE_BYTES + PROOF_BYTES
    both = mine + answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], _hash(secret, "proof of the caller", both)):
        yield REFUSED_PROOF, 0
        raise HandshakeFailed("it does not know this run's secret")
    yield _hash(secret, "proof of the listener", both), 0
    return Keys(_hash(secret, "key of the listener", both), _hash(secret, "key of the caller", both))


def call(secret: bytes) -> Handshake:
    """The handshake of the end that calls."""
    greeting = yield b"", len(HELLO_MAGIC) + NONCE_BYTES
    if not greeting.startswith(HELLO_MAGIC):
        raise HandshakeFailed("what answers there is not argosy, or another version of it")
    mine = secrets.token_bytes(NONCE_BYTES)
    both = greeting[len(HELLO_MAGIC) :] + mine
    proof = yield mine + _hash(secret, "proof of the caller", both), PROOF_BYTES
    if not hmac.compare_digest(proof, _hash(secret, "proof of the listener", both)):
        raise HandshakeFailed("what answers there does not know this run's secret")
    return Keys(_hash(secret, "key of the caller", both), _hash(secret, "key of the listener", both))


def _hash(secret: bytes, purpose: str, nonces: bytes) -> bytes:
    return hmac.digest(secret, purpose.encode() + nonces, "sha256")


TLS_FOLDER = "tls"
"""Folder in the run's folder that holds the certificate and the key made for it."""
YEARS = 10
CERTIFICATE_MAKER = (
    "cryptography.hazmat.primitives.asymmetric.ec",
    "tls",
    "launch.tls without launch.tls_certificate",
)
"""Arguments of `imported` for the module that makes keys."""


@dataclass(frozen=True)
class Certificate:
    """A certificate and its private key, as PEM files."""

    certificate: Path
    key: Path

    def write(self, certificate: bytes, key: bytes) -> None:
        """Write the two files, in PEM; only their user may read the key."""
        self.certificate.write_bytes(certificate)
        self.key.touch(mode=0o600)
        self.key.write_bytes(key)

    def context(self, is_server: bool) -> ssl.SSLContext:
        """Return what encrypts one end of a connection. Raises: UserError if the files are no such pair."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate itself is known, whichever machine shows it
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust it, and not those that it was signed with
        try:
            # Without a password OpenSSL would ask the terminal for that of a key that is encrypted.
            context.load_cert_chain(self.certificate, self.key, password="")
            context.load_verify_locations(self.certificate)
        except (OSError, ValueError) as problem:
            raise UserError(
                f"launch.tls_certificate = {self.certificate}, launch.tls_key = {self.key}: {problem}. Give a "
                "certificate and its private key, which is not encrypted, both as PEM files, or leave both keys out."
            ) from None
        return context


def server_context(run_dir: Path, launch: LaunchConfig) -> ssl.SSLContext | None:
    """Return what encrypts the coordinator's connections; None if the run file asks for none. Raises: UserError."""
    return _certificate(run_dir, launch).context(is_server=True) if launch.tls else None


def client_context(run_dir: Path, launch: LaunchConfig) -> ssl.SSLContext | None:
    """Return what encrypts an agent's connection; None if the run file asks for none. Raises: UserError."""
    return _certificate(run_dir, launch).context(is_server=False) if launch.tls else None


def check_tls(run_dir: Path, launch: LaunchConfig) -> None:
    """Check what encrypts the connections, and write nothing. Raises: UserError, as `server_context`."""
    if launch.tls and (launch.tls_certificate or (run_dir / TLS_FOLDER).exists()):
        _certificate(run_dir, launch).context(is_server=False)
    elif launch.tls:
        imported(*CERTIFICATE_MAKER)


def _certificate(run_dir: Path, launch: LaunchConfig) -> Certificate:
    if launch.tls_certificate:
        return Certificate(Path(launch.tls_certificate), Path(launch.tls_key))
    return certificate_of(run_dir)


def certificate_of(run_dir: Path) -> Certificate:
    """Return the certificate of a run, which the first call makes. Raises: UserError if the package for it is missing.

    Two nodes may make one at the same time: the folder that has its name first stays.
    """
    folder = run_dir / TLS_FOLDER
    found = Certificate(folder / "certificate.pem", folder / "key.pem")
    if not folder.exists():
        certificate, key = _made()
        with TemporaryDirectory(prefix=f"{TLS_FOLDER}-", suffix=".partial", dir=run_dir) as fresh:  # mode 0700
            pair = Path(fresh) / "pair"
            pair.mkdir()
            Certificate(pair / found.certificate.name, pair / found.key.name).write(certificate, key)
            with suppress(OSError):  # another was faster
                pair.rename(folder)
    return found


def _made() -> tuple[bytes, bytes]:
    """Return a self-signed certificate and its key, on the curve P-256, as PEM."""
    ec = imported(*CERTIFICATE_MAKER)
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.x509 import random_serial_number

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    first = now - datetime.timedelta(days=1)  # clocks of machines differ
    last = now + datetime.timedelta(days=365 * YEARS)
    return self_signed(key, "argosy run", random_serial_number(), first, last, SHA256())


def self_signed(
    key: Any, name: str, serial: int, first: datetime.datetime, last: datetime.datetime, algorithm: Any
) -> tuple[bytes, bytes]:
    """Return a certificate that `key` itself signs, valid from `first` to `last`, and the key, as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.x509.oid import NameOID

    named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(named)
        .issuer_name(named)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(first)
        .not_valid_after(last)
        .sign(key, algorithm)
    )
    return certificate.public_bytes(serialization.Encoding.PEM), key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
