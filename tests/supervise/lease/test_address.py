"""Which address other machines are told, and which ones are refused."""

from __future__ import annotations

import socket

import pytest

from argosy.config.schema import LaunchConfig
from argosy.errors import UserError
from argosy.supervise.lease import address
from argosy.supervise.lease.address import check_coordinator, own_address

NAMES = {"node0": "127.0.1.1", "localhost": "127.0.0.1", "node1": "10.0.0.7"}


@pytest.fixture(autouse=True)
def resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names as Debian's /etc/hosts has them on the machine node0."""

    def resolved(name: str) -> str:
        if name not in NAMES:
            raise socket.gaierror
        return NAMES[name]

    monkeypatch.setattr(socket, "gethostbyname", resolved)
    monkeypatch.setattr(socket, "gethostname", lambda: "node0")


@pytest.mark.parametrize("name", ["node0", "localhost"])
def test_a_coordinator_s_name_that_is_loopback_is_refused_with_several_nodes(name):
    with pytest.raises(UserError) as refused:
        check_coordinator(LaunchConfig(nodes=2, coordinator=f"{name}:29400"))
    text = str(refused.value)
    assert f"launch.coordinator = {name}:29400: {name} resolves to {NAMES[name]} on this machine" in text
    assert "127.0.0.1:29400 if all agents run on this machine" in text


@pytest.mark.parametrize(
    ("nodes", "coordinator"),
    [(1, "node0:1"), (2, "127.0.0.1:1"), (2, "node1:1"), (2, "unknown:1"), (2, "10.0.0.7:1"), (2, "")],
)
def test_what_others_can_reach_or_is_meant_so_is_taken(nodes, coordinator):
    check_coordinator(LaunchConfig(nodes=nodes, coordinator=coordinator))


def test_this_machine_s_address_is_the_given_one():
    launch = LaunchConfig(nodes=2, lease="folder", address="127.0.0.1")
    assert own_address(launch) == "127.0.0.1"


def test_a_host_name_that_is_loopback_is_refused_where_the_others_would_be_told_of_it():
    with pytest.raises(UserError, match=r"name node0 resolves to 127\.0\.1\.1.*Give launch\.address"):
        own_address(LaunchConfig(nodes=2, lease="folder"))
    assert own_address(LaunchConfig(nodes=1, lease="folder")) == "127.0.1.1"


def test_the_address_towards_etcd_is_preferred_unless_that_is_on_this_machine(monkeypatch):
    monkeypatch.setitem(NAMES, "node0", "10.0.0.9")
    assert own_address(LaunchConfig(nodes=2, lease="etcd://127.0.0.1:2379")) == "10.0.0.9"

    class Unconnected(socket.socket):
        def connect(self, address: object) -> None:
            pass

        def getsockname(self) -> tuple[str, int]:
            return ("10.0.0.5", 40000)

    monkeypatch.setattr(socket, "socket", Unconnected)
    assert own_address(LaunchConfig(nodes=2, lease="etcd://10.0.0.8:2379")) == "10.0.0.5"


def test_srun_s_machine_tells_which_of_this_one_s_addresses_the_others_reach(monkeypatch):
    monkeypatch.setitem(NAMES, "node0", "127.0.1.1")
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "192.0.2.7")
    monkeypatch.setattr(address, "_address_towards", {("192.0.2.7", 9): "10.0.0.5"}.get)
    assert own_address(LaunchConfig(nodes=2, lease="folder")) == "10.0.0.5"
