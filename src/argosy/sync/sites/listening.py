"""Where a site listens for the others: its exchange, and the probe of the links between sites."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from argosy.config.address import host_and_port, interface_of
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.processes.connection import Address
from argosy.processes.secret import secret_of
from argosy.sync.sites.keys import contexts
from argosy.sync.sites.links import Hello, Links, Refused
from argosy.sync.sites.messages import M

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
