"""The certificate with which sites encrypt what they send each other: it follows from the run's secret.

Whoever knows the secret has the same key and the same certificate, byte for byte, so that nothing has to be brought
from one site to another but the secret: Ed25519, whose signatures are deterministic (RFC 8032).
"""

from __future__ import annotations

import datetime
import hmac
import ssl
from pathlib import Path
from tempfile import TemporaryDirectory

from argosy.errors import missing_extra
from argosy.processes.tls import Certificate

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
