"""Addresses in the run file: HOST:PORT, and launch.lease, where agents agree on which machine coordinates."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

PATTERN = r"[^\s:]+:\d{1,5}"
MOST_PORT = 65535


def host_and_port(text: str) -> tuple[str, int]:
    """Return both of an address HOST:PORT."""
    host, _, port = text.rpartition(":")
    return host, int(port)


def interface_of(host: str) -> str:
    """Return the address to listen at for peers that call `host`: 127.0.0.1 for this machine alone, "" for all."""
    return "127.0.0.1" if host in ("127.0.0.1", "localhost") else ""


def _checked(text: str) -> str:
    if not re.fullmatch(PATTERN, text) or not 0 < host_and_port(text)[1] <= MOST_PORT:
        raise ValueError(
            f'"{text}" is no address. Write HOST:PORT, with a port from 1 to {MOST_PORT}, such as '
            '"node1.example.org:7100"'
        )
    return text


def _checked_if_given(text: str) -> str:
    return text and _checked(text)


Address = Annotated[str, AfterValidator(_checked), Field(json_schema_extra={"pattern": f"^{PATTERN}$"})]
OptionalAddress = Annotated[
    str, AfterValidator(_checked_if_given), Field(json_schema_extra={"pattern": f"^$|^{PATTERN}$"})
]
"""An address, or an empty text."""


ETCD_PORT = 2379
FORMS = (
    '"etcd://HOST:PORT,HOST:PORT,HOST:PORT" ("etcds://..." for TLS), "kubernetes://NAMESPACE/NAME", or "folder", '
    "the run's folder"
)
_ENDPOINT = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]+))(?::([0-9]{1,5}))?")
_DNS_LABEL = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_KUBERNETES = re.compile(rf"({_DNS_LABEL})/({_DNS_LABEL}(?:\.{_DNS_LABEL})*)")


@dataclass(frozen=True)
class LeaseUrl:
    """launch.lease, taken apart."""

    kind: Literal["folder", "etcd", "kubernetes"]
    endpoints: tuple[tuple[str, int], ...] = ()
    """etcd: hosts and ports."""
    is_tls: bool = False
    prefix: str = ""
    """etcd: what its keys begin with."""
    namespace: str = ""
    name: str = ""
    """Kubernetes: of the Lease object."""

    @classmethod
    def parse(cls, text: str) -> LeaseUrl:
        """Take the text apart. Raises: ValueError, a sentence that follows the key."""
        if text == "folder":
            return cls("folder")
        scheme, _, rest = text.partition("://")
        if scheme in ("etcd", "etcds") and rest:
            return cls._of_etcd(text, rest, scheme == "etcds")
        if scheme == "kubernetes" and (found := _KUBERNETES.fullmatch(rest)):
            return cls("kubernetes", namespace=found[1], name=found[2])
        raise ValueError(f'lease = "{text}" is not one of the forms that there are: {FORMS}')

    @classmethod
    def _of_etcd(cls, text: str, rest: str, is_tls: bool) -> LeaseUrl:
        if "@" in rest:
            raise ValueError(
                "lease names a user of etcd; leave that out, and set the environment variables ETCDCTL_USER and "
                "ETCDCTL_PASSWORD on each machine"
            )
        hosts, _, prefix = rest.partition("/")
        endpoints = []
        for host in hosts.split(","):
            found = _ENDPOINT.fullmatch(host)
            if found is None or int(found[3] or ETCD_PORT) not in range(1, 65536):
                raise ValueError(f'lease = "{text}": "{host}" is not HOST:PORT')
            endpoints.append((found[1] or found[2], int(found[3] or ETCD_PORT)))
        return cls("etcd", tuple(endpoints), is_tls, prefix.strip("/"))
