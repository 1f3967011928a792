"""Nodes in network namespaces of their own, joined by a switch in another: links that can be cut, one file system."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SWITCH = "switch"
BRIDGE = "bridge"


class NotPermitted(Exception):
    """Namespaces cannot be made here; the text says why."""


class Network:
    """Namespaces argosy-PID-NAME with the addresses 10.77.0.1, 10.77.0.2, ... in the order of their names."""

    def __init__(self, *names: str):
        self._addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}

    def address(self, name: str) -> str:
        """The IPv4 address of a node."""
        return self._addresses[name]

    def inside(self, name: str) -> tuple[str, ...]:
        """Words before a command that is to run on a node."""
        return ("ip", "netns", "exec", _namespace(name))

    def unplug(self, name: str) -> None:
        """The node's own link is down: it has no way to anywhere, and knows it."""
        _ip("-n", _namespace(name), "link", "set", "eth0", "down")

    def plug_in(self, name: str) -> None:
        """The link is up again."""
        _ip("-n", _namespace(name), "link", "set", "eth0", "up")

    def cut_off(self, name: str) -> None:
        """What the node sends, and what is sent to it, gets lost on the way: nobody is told."""
        _ip("-n", _namespace(SWITCH), "link", "set", _port(name), "nomaster")

    def let_through(self, name: str) -> None:
        """The way to the node is mended."""
        _ip("-n", _namespace(SWITCH), "link", "set", _port(name), "master", BRIDGE)

    def throttle(self, name: str, bits_per_s: int) -> None:
        """What the node sends goes no faster than that from now on."""
        rate = ("rate", f"{bits_per_s}bit", "burst", "32kb", "latency", "1s")
        _run("tc", "-n", _namespace(name), "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate)

    def build(self) -> None:
        """Raises: NotPermitted."""
        if os.geteuid():
            raise NotPermitted("network namespaces need root")
        try:
            _sweep()
            self._build()
        except (FileNotFoundError, subprocess.CalledProcessError) as problem:
            self.remove()
            raise NotPermitted(f"network namespaces: {getattr(problem, 'stderr', '') or problem}") from None

    def _build(self) -> None:
        switch = _namespace(SWITCH)
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", BRIDGE, "type", "bridge")
        _ip("-n", switch, "link", "set", BRIDGE, "up")
        for name, address in self._addresses.items():
            namespace, port = _namespace(name), _port(name)
            _ip("netns", "add", namespace)
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("-n", switch, "link", "set", port, "master", BRIDGE, "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")

    def remove(self) -> None:
        """Whatever of it there is."""
        for name in (*self._addresses, SWITCH):
            with suppress(FileNotFoundError, subprocess.CalledProcessError):
                _ip("netns", "delete", _namespace(name))


@contextmanager
def network(*names: str) -> Iterator[Network]:
    """A network of these nodes. Raises: NotPermitted."""
    built = Network(*names)
    built.build()
    try:
        yield built
    finally:
        built.remove()


def _sweep() -> None:
    """Remove what processes that were killed have left."""
    for line in _ip("netns", "list").splitlines():
        namespace = line.split()[0]
        prefix, _, pid = namespace.rpartition("-")[0].partition("-")
        if prefix == "argosy" and not Path(f"/proc/{pid}").exists():
            with suppress(subprocess.CalledProcessError):  # somebody else was faster
                _ip("netns", "delete", namespace)


def _namespace(name: str) -> str:
    return f"argosy-{os.getpid()}-{name}"


def _port(name: str) -> str:
    """The switch's end of a node's link."""
    return f"to-{name}"


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
