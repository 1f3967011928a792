"""Show runs in a web page: while they train, afterwards, or copies of them.

Without a name, all runs under the folder `runs` are shown, side by side. Only this machine can open the page unless
--host says otherwise; then, and with --allow, the address that is printed holds a token, and nobody gets in without it.
From elsewhere, an SSH tunnel does as well: ssh -L 8765:127.0.0.1:8765 MACHINE.

Nothing is written to a run's folder, and a run does not notice that it is watched. /metrics is for Prometheus.

Examples:
  argosy watch                                  all runs under runs
  argosy watch runs/demo --open                 one run, in the browser at once
  argosy watch runs/demo --terminal             in the terminal
  argosy watch /shared/runs --host 0.0.0.0      for others on the network, with a token
  argosy watch runs --mcp                       for an agent that starts it: MCP over stdin and stdout, read only
  argosy watch runs --mcp-http                  the page, and MCP at its address /mcp
  argosy watch runs --mcp --allow start,stop    an agent may start and stop runs, each after a dry run
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
import webbrowser
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from argosy.cli.documents import write
from argosy.cli.options import HostAddress, parse
from argosy.errors import ArgosyWarning, UserError, imported

if TYPE_CHECKING:
    from argosy.watch.mcp_server import Allowed

WATCH_TOKEN_VARIABLE = "ARGOSY_WATCH_TOKEN"
"""Variable of the environment with a token of the user's own; then 127.0.0.1 asks for it as well."""


@dataclass(frozen=True)
class Options:
    run: Annotated[Path, tyro.conf.Positional] = Path("runs")
    """A run's folder, or a folder with runs."""
    host: HostAddress = "127.0.0.1"
    port: int | None = None
    """Port to listen at; 8765 or the next free one if not given."""
    terminal: bool = False
    """Show it in the terminal."""
    open: bool = False
    """Open the page in a browser."""
    mcp: bool = False
    """Speak the Model Context Protocol on stdin and stdout, and show no page: an agent starts it so."""
    mcp_http: bool = False
    """Speak it at the page's address too, under /mcp, with the page's token."""
    allow: str = ""
    """Actions that agents may take beside reading: start, stop, replan, separated by commas."""
    json: bool = False
    """Print JSON: the address. The page itself is not printed."""


@dataclass(frozen=True)
class WatchAddress:
    """The address at which runs are shown."""

    folder: Path
    url: str
    """Address of the page, with the token if it asks for one."""
    mcp: str | None
    """The address of the MCP server, with --mcp-http; it asks for the same token."""


def main(argv: list[str]) -> int:
    options = parse(argv, "argosy watch", Options)
    root = _folder(options.run)
    _check_page(options)
    allowed = _allowed(options)
    warnings.simplefilter("ignore", ArgosyWarning)  # of an old run.toml: it is the run that is asked to change it
    if options.terminal:
        return int(import_module("argosy.watch.terminal").main(root))
    if options.mcp or options.mcp_http:
        imported("mcp", "mcp", "argosy watch --mcp")
    if options.mcp:
        _speak_over_pipes(root, allowed)
        return 0
    for module in ("msgspec", "starlette", "uvicorn"):
        imported(module, "watch", "argosy watch")
    from argosy.config.launch import is_loopback
    from argosy.watch.http import listening, new_token, token_of, url
    from argosy.watch.serve import server_of

    mcp = None
    if options.mcp_http:
        from argosy.watch.mcp_server import server_of_runs

        mcp = server_of_runs(root, allowed)
    # All users of a machine reach its loopback addresses; who starts and stops runs must be the one who said --allow.
    token = token_of(WATCH_TOKEN_VARIABLE) or ("" if is_loopback(options.host) and not allowed else new_token())
    with listening(options.host, options.port) as listener:
        address = url(listener, options.host, token)
        if options.json:
            write("watch", WatchAddress(root, address, address.partition("?")[0] + "mcp" if mcp else None))
        else:
            print(f"{root} is shown at {address}   (Ctrl-C ends this, and no run)", flush=True)
        if options.open:
            webbrowser.open(address)
        try:
            server_of(root, listener, token, options.host, mcp).run(sockets=[listener])
        except KeyboardInterrupt:
            print()
    return 0


def _check_page(options: Options) -> None:
    """Raises: UserError if one asks for a page, and another for none."""
    of_page = {
        "--json": options.json,
        "--open": options.open,
        "--mcp-http": options.mcp_http,
        "--host": options.host != Options.host,
        "--port": options.port is not None,
    }
    without = [word for word, said in (("--terminal", options.terminal), ("--mcp", options.mcp)) if said]
    if without and (said := next((word for word, said in of_page.items() if said), None)):
        raise UserError(f"{said} is for the page, and with {without[0]} there is none. Leave one of them out.")
    if len(without) > 1:
        raise UserError("--terminal and --mcp: both want stdin and stdout. Leave one of them out.")


def _allowed(options: Options) -> list[Allowed]:
    """Return what agents may do. Raises: UserError if there is no such thing, or no agent."""
    words = [word.strip() for word in options.allow.split(",") if word.strip()]
    known: dict[str, Allowed] = {"start": "start", "stop": "stop", "replan": "replan"}
    if unknown := [word for word in words if word not in known]:
        raise UserError(f"--allow {unknown[0]}: there is no such thing. Allow some of: {', '.join(known)}.")
    if words and not (options.mcp or options.mcp_http):
        raise UserError("--allow: it says what agents may do; give --mcp or --mcp-http as well.")
    return [known[word] for word in dict.fromkeys(words)]


def _speak_over_pipes(root: Path, allowed: list[Allowed]) -> None:
    """Answer an agent until it closes the pipe. The process dies of SIGPIPE if its answers are not read any more."""
    from argosy.watch.mcp_server import server_of_runs

    if sys.stdin.isatty():
        print(
            "argosy watch --mcp: for an agent, which starts it and writes to its stdin; Ctrl-C ends it", file=sys.stderr
        )
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)  # Python would wait for the thread that reads stdin
    server_of_runs(root, allowed).run("stdio")


def _folder(path: Path) -> Path:
    """Return the folder to show. Raises: UserError if it is none, or a foreign file."""
    if not path.exists():
        remedy = "Train one with `argosy train`, or name" if path == Path("runs") else "Name"
        raise UserError(f"{path}: no such folder. {remedy} a run's folder or one that holds runs: argosy watch FOLDER")
    if not path.is_dir():
        raise UserError(f"{path}: a file. Name the folder of a run, such as {path.parent}.")
    if not os.access(path, os.R_OK | os.X_OK):
        raise UserError(f"{path}: may not be read by this user. Ask its owner for the permission.")
    return path.absolute()
