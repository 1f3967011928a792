"""The process of a site's exchange: `python -m argosy.sync.sites.main RUN_FOLDER`, a child of the site's agent."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.observe.events import Events
from argosy.processes.child import channel_to_parent, messages
from argosy.processes.connection import Address
from argosy.processes.secret import secret_of
from argosy.sync.sites.exchange import Exchange
from argosy.sync.sites.keys import contexts
from argosy.sync.sites.layout import Sites, group_folder
from argosy.sync.sites.ledger import Ledger
from argosy.sync.sites.links import Hello, Links, Refused

TURN_S = 0.02
"""How often it looks for what the ranks have left."""
BIND_S = 10.0
"""The port is tried for this long: the exchange before this one may not have let go of it."""


def address_of(text: str) -> Address:
    """Return the address that HOST:PORT says."""
    host, _, port = text.rpartition(":")
    return host, int(port)


def listener_at(address: Address) -> socket.socket:
    """Listen at the port of `address`, on all interfaces unless it is this machine's own. Raises: OSError."""
    host = address[0] if address[0] in ("127.0.0.1", "localhost") else ""
    until = time.monotonic() + BIND_S
    while True:
        try:
            return socket.create_server((host, address[1]), backlog=16)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def open_links(run: RunConfig, me: str, folder: Path) -> Callable[[Hello, Refused], Links]:
    """Listen where the site `me` is called, and return what makes its `Links`. Raises: UserError.

    folder: where the secret of the run is.
    """
    secret = secret_of(folder)
    tls = contexts(secret) if run.sync.tls else None
    addresses = {site.name: address_of(site.address) for site in run.sites}
    try:
        listener = listener_at(addresses[me])
    except OSError as problem:
        host, port = addresses[me]
        raise UserError(
            f"sites: {me} cannot listen at {host}:{port} ({os.strerror(problem.errno or 0)}). Is the run training "
            "there already? Else end the program that has the port, or give the site another address."
        ) from None
    return partial(Links, me, addresses, listener, secret, tls)


def open_exchange(run: RunConfig, run_dir: Path) -> Exchange:
    """Return the exchange of the site whose run is in `run_dir`. Raises: UserError."""
    sites = Sites.of(run, run_dir)
    links = open_links(run, sites.me, group_folder(run_dir))
    return Exchange(
        sites, Ledger(run_dir), Events(run_dir, "exchange"), lambda exchange: links(exchange.hello, exchange.refused)
    )


def main() -> None:
    """Exchange changes with the other sites until the agent says that the run is over, or ends."""
    run_dir = Path(sys.argv[1])
    run, ending = load(run_dir / "run.toml"), threading.Event()
    channel = channel_to_parent()
    try:
        exchange = open_exchange(run, run_dir)
    except UserError as problem:  # the agent starts another one: the port may be free by then
        print(f"argosy: {problem}", flush=True)
        sys.exit(problem.exit_code)
    is_gone = threading.Event()

    def listen() -> None:
        for message in messages(channel):
            if message["kind"] == "finish":
                ending.set()
        is_gone.set()
        ending.set()

    threading.Thread(target=listen, name="argosy-parent", daemon=True).start()
    while not ending.is_set():
        exchange.turn(TURN_S)
    until = time.monotonic() + run.sync.patience_s
    while exchange.rounds >= exchange.sites.rounds and not exchange.is_over and not is_gone.is_set():
        if time.monotonic() > until:
            break
        exchange.turn(TURN_S)
    exchange.close()


if __name__ == "__main__":
    main()
