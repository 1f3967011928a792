"""Sites as network namespaces: a bridge joins them, with a throttle (`tc tbf`) at both ends of each one's link."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argosy.parallel.world import World

CORE, ADDRESS = "thin-core", "10.77.0.{}"
LINK = "wan"
UNLIMITED = "unlimited"
ETC = Path("/etc/netns")


def check_that_this_machine_can() -> None:
    """Leave with a clear word where there can be no namespaces."""
    if os.geteuid() or not shutil.which("tc") or not shutil.which("ip"):
        sys.exit("skipped: network namespaces need root and iproute2 (Debian: apt-get install iproute2)")


def name(site: int) -> str:
    return f"thin-{site}"


def address(site: int) -> str:
    return ADDRESS.format(site + 1)


def inside(site: int, *command: str) -> list[str]:
    """Return a command that runs in a site."""
    return ["ip", "netns", "exec", name(site), *command]


def inside_by_name(site: int, *command: str) -> list[str]:
    """Return a command that runs in a site which has a hostname of its own, as torchft needs it."""
    renamed = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name(site)]
    return inside(site, *renamed, *command)


@contextmanager
def sites(many: int, rate: str) -> Iterator[None]:
    """Make the namespaces; `rate` as tc has it, or unlimited."""
    spaces = [CORE, *map(name, range(many))]
    hosts = "127.0.0.1 localhost\n" + "".join(f"{address(site)} {name(site)}\n" for site in range(many))
    for space in spaces:
        (ETC / space).mkdir(parents=True, exist_ok=True)
        (ETC / space / "hosts").write_text(hosts)  # `ip netns exec` puts it over /etc/hosts
        if Path("/run/netns", space).exists():  # of a benchmark that was killed
            call(f"ip netns del {space}")
        call(f"ip netns add {space}")
    try:
        call(f"ip -n {CORE} link add br0 type bridge")
        call(f"ip -n {CORE} link set br0 mtu 9000 up")
        for site in range(many):
            space = name(site)
            call(f"ip -n {space} link set lo up")
            call(f"ip -n {space} link add {LINK} mtu 9000 type veth peer name to{site} mtu 9000 netns {CORE}")
            call(f"ip -n {CORE} link set to{site} master br0 up")
            call(f"ip -n {space} addr add {address(site)}/24 dev {LINK}")
            call(f"ip -n {space} link set {LINK} up")
            for where, link in (space, LINK), (CORE, f"to{site}"):
                if rate != UNLIMITED:
                    call(f"tc -n {where} qdisc add dev {link} root tbf rate {rate} burst 128kb latency 200ms")
        yield
    finally:
        for space in spaces:
            call(f"ip netns del {space}")
            shutil.rmtree(ETC / space)


def run_ranks(many: int, each: int, rate: str, *command: str) -> int:
    """Run a command as `each` ranks of as many sites, with `--worker RANK` behind it; return the worst exit code."""
    with sites(many, rate):
        workers = [
            subprocess.Popen(inside(rank // each, *command, "--worker", str(rank))) for rank in range(many * each)
        ]
        return max([abs(worker.wait()) for worker in workers])


def join_as_rank(rank: int, size: int, each: int) -> World:
    """Join the world of the ranks of all sites, `each` in a site, with one thread."""
    import torch  # the workers alone need it

    from argosy.config.launch import LaunchConfig
    from argosy.parallel.world import join_world

    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(each), "LOCAL_RANK": str(rank % each),
        "MASTER_ADDR": address(0), "MASTER_PORT": "29501", "GLOO_SOCKET_IFNAME": LINK,
    }  # fmt: skip
    # That of this namespace.
    subprocess.run(["mount", "-t", "sysfs", "sysfs", "/sys"], check=False, stderr=subprocess.DEVNULL)
    world = join_world(LaunchConfig(timeout_s=300.0, threads=1))
    torch.set_num_threads(1)
    return world


def call(command: str) -> None:
    subprocess.run(command.split(), check=True)


HEADER_BYTES = 66
"""Ethernet, IP and TCP with time stamps, of each packet that the kernel gives the interface."""


@dataclass(frozen=True)
class Sent:
    """What an interface has sent."""

    whole: float
    """Bytes, headers and acknowledgements included."""
    payload: float
    """Bytes without headers."""

    def since(self, before: Sent, steps: int) -> Sent:
        """Return what a step of so many sent."""
        return Sent((self.whole - before.whole) / steps, (self.payload - before.payload) / steps)


def sent(site: int) -> Sent:
    """Return what the interface of a site has sent."""
    words = ["ip", "-n", name(site), "-s", "-j", "link", "show", LINK]
    found = subprocess.run(words, check=True, capture_output=True, text=True)
    tx = json.loads(found.stdout)[0]["stats64"]["tx"]
    return Sent(tx["bytes"], tx["bytes"] - HEADER_BYTES * tx["packets"])


def sent_here() -> Sent:
    """Return what the interface of the site that this process runs in has sent."""
    statistics = Path(f"/sys/class/net/{LINK}/statistics")
    whole, packets = (int((statistics / f"tx_{unit}").read_text()) for unit in ("bytes", "packets"))
    return Sent(whole, whole - HEADER_BYTES * packets)
