"""The links between sites, measured over the connections that sites use, and the same at all of them."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from argosy.config.schema import RunConfig
from argosy.config.sync import SiteConfig, SyncConfig
from argosy.errors import RunFailed, UserError
from argosy.plan.hardware.clusters import Cluster, NetworkTier, SiteLink
from argosy.plan.hardware.local_machine import own_part
from argosy.plan.hardware.measurements import Measurements
from argosy.probe import sites
from argosy.probe.sites import LinkMeasurement, joined, joined_links, probe_links
from ports import free_port


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sites, "STREAM_S", 0.2)


def of(names: str, tls: bool = True) -> RunConfig:
    places = tuple(SiteConfig(name=name, address=f"127.0.0.1:{free_port()}") for name in names.split())
    return RunConfig(name="probed", sites=places, sync=SyncConfig(tls=tls))


def at(run: RunConfig, name: str, folder: Path) -> Cluster:
    """Probe the links at one site, whose machine has as many processes as its name has letters."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.toml"
    found = Measurements(host="h", layer_host_s=len(name) * 1e-3)
    Cluster.parse(f"{len(name)}xcpu").model_copy(update={"measured": found}).save(file)
    return probe_links(run.model_copy(update={"site": name}), file, 20.0, quiet=True)


@pytest.mark.parametrize("names", ["oslo lyon", "oslo lyon bergen"])
def test_all_sites_come_to_the_same_links_and_groups(names: str, tmp_path: Path) -> None:
    run, found = of(names), dict[str, Cluster]()
    threads = [
        threading.Thread(target=lambda name=name: found.update({name: at(run, name, tmp_path)}))
        for name in names.split()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == sorted(names.split())
    first = found["oslo"]
    many = len(names.split())
    assert len(first.links) == many * (many - 1) // 2
    assert all(link.bandwidth_bytes_per_s > 1e6 and 0 < link.latency_s < 1 for link in first.links)
    assert first.sites == {name: len(name) for name in names.split()}
    for name, other in found.items():
        assert (other.links, other.groups, other.network) == (first.links, first.groups, first.network)
        assert other.measured is not None and other.measured.site == name
        assert other.measured_at == first.measured_at and other.measured_at[name] == other.measured
        assert {site: told.layer_host_s for site, told in other.measured_at.items()} == {
            site: len(site) * 1e-3 for site in names.split()
        }
        assert other.of_site(name).measured == other.measured and not other.of_site(name).measured_at
        other.save(tmp_path / "saved.toml")
        assert Cluster.load(tmp_path / "saved.toml") == other


def test_a_site_that_does_not_come_is_named(tmp_path: Path) -> None:
    run = of("oslo lyon", tls=False).model_copy(update={"site": "oslo"})
    Cluster.parse("1xcpu").save(tmp_path / "cluster.toml")
    with pytest.raises(RunFailed, match="waited for lyon for 1 s"):
        probe_links(run, tmp_path / "cluster.toml", 1.0, quiet=True)


def test_a_machine_that_nobody_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"argosy probe --run RUN.toml` first"):
        probe_links(of("oslo lyon").model_copy(update={"site": "oslo"}), tmp_path / "none.toml", 1.0, quiet=True)


def test_a_port_that_is_taken_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argosy.sync.links.BIND_S", 0.0)
    run = of("oslo lyon", tls=False).model_copy(update={"site": "oslo"})
    Cluster.parse("1xcpu").save(tmp_path / "cluster.toml")
    with (
        socket.create_server(("127.0.0.1", int(run.sites[0].address.split(":")[1]))),
        pytest.raises(UserError, match=r"oslo cannot listen at 127\.0\.0\.1"),
    ):
        probe_links(run, tmp_path / "cluster.toml", 1.0, quiet=True)


def test_of_both_directions_the_slower_one_counts() -> None:
    found = {("a", "b"): LinkMeasurement(2e6, 0.01), ("b", "a"): LinkMeasurement(1e6, 0.02)}
    assert joined_links(found) == (SiteLink(sites=("a", "b"), bandwidth_bytes_per_s=1e6, latency_s=0.02),)


def test_sites_with_unlike_networks_are_joined_as_the_slowest() -> None:
    own = Cluster.parse("2x4xcpu")
    slow = NetworkTier(name="leaf", devices=16, bandwidth_bytes_per_s=1e6, latency_s=1e-3)
    other = Cluster(groups=own.groups, network=(slow,))
    link = SiteLink(sites=("a", "b"), bandwidth_bytes_per_s=1e6, latency_s=0.02)
    found = joined(own, ["a", "b"], {"a": own, "b": other}, [link])
    (tier,) = found.network
    assert (tier.devices, tier.bandwidth_bytes_per_s) == (8, 1e6)


def test_a_run_without_sites_on_a_machine_of_several_takes_that_machine_s_part() -> None:
    two = Cluster.parse("two-sites").model_copy(update={"measured": Measurements(site="west")})
    assert own_part(RunConfig(), two).sites == {"west": 64}
    assert own_part(of("east west").model_copy(update={"site": "east"}), two).sites == {"east": 64}
    assert own_part(of("east west"), two) is two
