"""Real hosts for ssh on this machine: a sshd for each, on a port of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ports import free_port

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
WHERE_FROM = "needs sshd, and root to start it: apt-get install openssh-server"
READY_S = 20.0


def is_installed() -> bool:
    return os.geteuid() == 0 and SSHD is not None and shutil.which("ssh") is not None


@dataclass
class Hosts:
    """Hosts h1, h2, ..., which ssh reaches with the option `-F CONFIG`."""

    folder: Path
    servers: dict[str, subprocess.Popen[bytes]]

    @property
    def option(self) -> str:
        """What `argosy launch` passes to ssh."""
        return f"--extra=-F{self.folder / 'config'}"

    def lose(self, host: str) -> None:
        """End a host's server: there is no way to it any more."""
        self.servers[host].send_signal(signal.SIGTERM)
        self.servers[host].wait(READY_S)


@contextmanager
def hosts(folder: Path, number: int) -> Iterator[Hosts]:
    """Start so many. Also in the configuration: `alias`, which is h1, and `nowhere`, where nobody listens."""
    folder.mkdir(parents=True, exist_ok=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    for key in ("host", "user"):
        words = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
        subprocess.run(words, check=True)
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    ports = {f"h{index}": free_port() for index in range(1, number + 1)}
    known = (folder / "host.pub").read_text()
    (folder / "known_hosts").write_text("".join(f"[127.0.0.1]:{port} {known}" for port in ports.values()))
    (folder / "config").write_text(_client(folder, {**ports, "alias": ports["h1"], "nowhere": free_port()}))
    running = Hosts(folder, {})
    try:
        for host, port in ports.items():
            (folder / f"{host}.conf").write_text(_server(folder, port))
            words = (str(SSHD), "-D", "-e", "-f", str(folder / f"{host}.conf"))
            with (folder / f"{host}.log").open("wb") as log:
                running.servers[host] = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        for port in ports.values():
            _wait_for(port)
        yield running
    finally:
        for server in running.servers.values():
            server.send_signal(signal.SIGTERM)
            server.wait(READY_S)


def _client(folder: Path, ports: dict[str, int]) -> str:
    common = f"HostName 127.0.0.1\nIdentityFile {folder}/user\nUserKnownHostsFile {folder}/known_hosts\n"
    return "".join(f"Host {host}\nPort {port}\n{common}" for host, port in ports.items())


def _server(folder: Path, port: int) -> str:
    lines = [
        f"Port {port}",
        "ListenAddress 127.0.0.1",
        f"HostKey {folder}/host",
        f"AuthorizedKeysFile {folder}/authorized_keys",
        "StrictModes no",  # the folder of tests is in /tmp
        f"SetEnv HOME={folder}",  # what this machine's user has every shell do takes longer than the commands
        "PermitRootLogin prohibit-password",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "UsePAM no",
        "PidFile none",
    ]
    return "\n".join(lines) + "\n"


def _wait_for(port: int) -> None:
    end = time.monotonic() + READY_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert time.monotonic() < end, "sshd does not start"
            time.sleep(0.05)
        else:
            return
