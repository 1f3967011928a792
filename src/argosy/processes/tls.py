"""TLS between the processes of a run: both ends show the same certificate, and accept no other.

The certificate is the user's, or one that is made for the run and kept in its folder. TLS encrypts; who may speak is
settled by the run's secret (`secret`), inside of it.
"""

from __future__ import annotations

import datetime
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from argosy.config.launch import LaunchConfig
from argosy.errors import UserError, missing_extra

FOLDER = "tls"
"""In the run's folder: the certificate and the key that were made for it."""
YEARS = 10


@dataclass(frozen=True)
class Certificate:
    """A certificate and its private key, as PEM files."""

    certificate: Path
    key: Path

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


def _certificate(run_dir: Path, launch: LaunchConfig) -> Certificate:
    if launch.tls_certificate:
        return Certificate(Path(launch.tls_certificate), Path(launch.tls_key))
    return certificate_of(run_dir)


def certificate_of(run_dir: Path) -> Certificate:
    """Return the certificate of a run, which the first call makes. Raises: UserError if the package for it is missing.

    Two nodes may make one at the same time: the folder that has its name first stays.
    """
    folder = run_dir / FOLDER
    found = Certificate(folder / "certificate.pem", folder / "key.pem")
    if not folder.exists():
        certificate, key = _made()
        with TemporaryDirectory(prefix=f"{FOLDER}-", suffix=".partial", dir=run_dir) as fresh:  # mode 0700
            pair = Path(fresh) / "pair"
            pair.mkdir()
            (pair / found.certificate.name).write_bytes(certificate)
            (pair / found.key.name).touch(mode=0o600)
            (pair / found.key.name).write_bytes(key)
            with suppress(OSError):  # another was faster
                pair.rename(folder)
    return found


def _made() -> tuple[bytes, bytes]:
    """Return a self-signed certificate and its key, on the curve P-256, as PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError:
        raise missing_extra("cryptography", "tls", "launch.tls without launch.tls_certificate") from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "argosy run")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks of machines differ
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM), key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
