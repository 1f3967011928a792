"""The address and the certificate with which a site listens for the others: its exchange, and the probe of links.

The certificate follows from the run's secret. Whoever knows the secret has the same key and the same certificate, byte
for byte, so that nothing has to be brought from one site to another but the secret: Ed25519, whose signatures are
deterministic (RFC 8032).
"""

from __future__ import annotations

import datetime
import hmac
import os
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import TypeAdapter

from argosy.config.launch import host_and_port, interface_of
from argosy.config.schema import RunConfig
from argosy.errors import UserError, missing_extra
from argosy.processes.connection import Address
from argosy.processes.secret import secret_of
from argosy.processes.tls import Certificate
from argosy.sync.sites.links import Hello, Links, Refused
from argosy.sync.sites.messages import M

FIRST, LAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC), datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)
"""Its validity is part of what must be the same everywhere."""


def contexts(secret: bytes) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return what encrypts the end that calls, and the end that is called. Raises: UserError without `cryptography`."""
    certificate, key = made(secret)
    with TemporaryDirectory(prefix="argosy-") as folder:  # mode 0700; OpenSSL reads keys from files only
        pair = Certificate(Path(folder) / "certificate.pem", Path(folder) / "key.pem")
        pair.certificate.write_bytes(certificate)
        pair.key.touch(mode=0o600)
        pair.key.write_bytes(key)
        return pair.context(is_server=False), pair.context(is_server=True)


def made(secret: bytes) -> tuple[bytes, bytes]:
    """Return the certificate and the key of a secret, as PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
        from cryptography.x509.oid import NameOID
    except ImportError:
        raise missing_extra("cryptography", "tls", "sync.tls = true") from None
    key = ed25519.Ed25519PrivateKey.from_private_bytes(hmac.digest(secret, b"key between sites", "sha256"))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "argosy sites")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(FIRST)
        .not_valid_after(LAST)
        .sign(key, None)
    )
    return certificate.public_bytes(serialization.Encoding.PEM), key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


BIND_S = 10.0
"""The port is tried for this long: the process that had it before may not have let go of it."""


def _listener_at(address: Address) -> socket.socket:
    """Listen at the port of `address`, on all interfaces unless it is this machine's own. Raises: OSError."""
    host = interface_of(address[0])
    until = time.monotonic() + BIND_S
    while True:
        try:
            return socket.create_server((host, address[1]), backlog=16)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def open_links(run: RunConfig, me: str, folder: Path, kinds: TypeAdapter[M]) -> Callable[[Hello, Refused], Links[M]]:
    """Listen where the site `me` is called, and return what makes its `Links`. Raises: UserError.

    folder: where the secret of the run is. kinds: the messages of the sites.
    """
    secret = secret_of(folder)
    tls = contexts(secret) if run.sync.tls else None
    addresses = {site.name: host_and_port(site.address) for site in run.sites}
    try:
        listener = _listener_at(addresses[me])
    except OSError as problem:
        host, port = addresses[me]
        raise UserError(
            f"sites: {me} cannot listen at {host}:{port} ({os.strerror(problem.errno or 0)}). Is the run training "
            "there already? Else end the program that has the port, or give the site another address."
        ) from None
    return partial(Links, me, addresses, listener, secret, tls, kinds)
