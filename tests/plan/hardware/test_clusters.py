"""Clusters: the shorthand, files that read back as they were, tiers, and messages that say what to do."""

from itertools import pairwise

import pytest

from argosy.config.layers import preset_names
from argosy.errors import UserError
from argosy.plan.hardware.clusters import Cluster, Factor
from argosy.plan.hardware.devices import find_device

CLUSTERS = [*preset_names("clusters"), "256xh100", "2x4xa100", "64xh100+16xa100", "256xgb200", "1xcpu"]


@pytest.fixture
def refusal(tmp_path):
    """The message for a cluster file of this text, without its folder."""

    def refuse(text: str) -> str:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        with pytest.raises(UserError) as error:
            Cluster.load(path)
        return str(error.value).replace(f"{tmp_path}/", "")

    return refuse


@pytest.mark.parametrize(
    ("text", "nodes", "devices_per_node"),
    [
        ("256xh100", 32, 8),
        ("4xH100", 1, 4),
        ("32x4xh100", 32, 4),
        ("144xgb200", 2, 72),
        ("256xgb200", 4, 64),  # racks of 72, of which 64 are used
        ("512xtpu-v5p", 1, 512),
    ],
)
def test_shorthand_says_nodes_and_devices(text, nodes, devices_per_node):
    cluster = Cluster.parse(text)
    assert (cluster.nodes, cluster.devices_per_node, cluster.devices) == (
        nodes,
        devices_per_node,
        nodes * devices_per_node,
    )
    assert cluster.uniform
    assert cluster.sites == {"here": cluster.devices}


def test_groups_may_differ_and_the_slowest_is_the_device():
    cluster = Cluster.parse("64xh100 + 32xa100")
    assert [(group.device.name, group.devices) for group in cluster.groups] == [("H100-SXM", 64), ("A100-80", 32)]
    assert not cluster.uniform
    assert cluster.device is find_device("a100")
    node, network = cluster.tiers
    assert (node.bytes_per_s, network.bytes_per_s) == (300e9, 25e9)  # the slower ones


@pytest.mark.parametrize("text", CLUSTERS)
def test_tiers_grow_and_slow_down_outwards_until_they_hold_everything(text):
    tiers = Cluster.parse(text).tiers
    assert tiers[-1].devices >= Cluster.parse(text).devices
    for inner, outer in pairwise(tiers):
        assert outer.devices > inner.devices
        assert outer.bytes_per_s <= inner.bytes_per_s
        assert outer.latency_s >= inner.latency_s


def test_sites_share_their_link():
    cluster = Cluster.parse("two-sites")
    assert cluster.sites == {"east": 64, "west": 64}
    assert cluster.uniform
    node, network, site = cluster.tiers
    assert (node.devices, network.devices, site.devices) == (8, 64, 128)
    assert site.bytes_per_s * 64 == cluster.links[0].bandwidth_bytes_per_s


def test_oversubscription_divides_the_bandwidth():
    _, pod, spine = Cluster.parse("h100-16384").tiers
    assert (pod.bytes_per_s, spine.bytes_per_s) == (50e9, 50e9 / 7)


@pytest.mark.parametrize("text", CLUSTERS)
def test_a_saved_cluster_reads_back_as_it_was(tmp_path, text):
    cluster = Cluster.parse(text).model_copy(update={"factors": {"compute": Factor(value=1.1, std=0.02)}})
    cluster.save(tmp_path / "mine.toml")
    assert Cluster.parse(str(tmp_path / "mine.toml")) == cluster


def test_a_device_that_the_catalogue_has_not_is_written_out(tmp_path):
    measured = find_device("cpu").model_copy(update={"memory_bytes_per_s": 1.25e10, "source": "measured"})
    laptop = Cluster.parse("laptop")
    group = laptop.groups[0].model_copy(update={"device": measured})
    laptop.model_copy(update={"groups": (group,)}).save(tmp_path / "mine.toml")
    assert Cluster.load(tmp_path / "mine.toml").device == measured


def test_a_devices_file_is_found_beside_the_clusters(tmp_path, monkeypatch):
    group = Cluster.parse("laptop").groups[0].device.model_copy(update={"mtbf_h": 7.0})
    inline = Cluster.parse("laptop").groups[0].model_copy(update={"device": group})
    Cluster(groups=(inline,)).save(tmp_path / "whole.toml")
    table = (tmp_path / "whole.toml").read_text().split("[groups.device]", 1)[1].split("[measured]")[0]
    (tmp_path / "core.toml").write_text(table.replace("[groups.device.", "["))
    (tmp_path / "mine.toml").write_text('[[groups]]\ndevice = "core.toml"\nnodes = 2\n')
    monkeypatch.chdir("/")
    assert Cluster.load(tmp_path / "mine.toml").device == group


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0xh100", "there must be at least one device. Try 8xh100."),
        ("4x00xh100", "there must be at least one device"),
        ("600000xh100+600000xh100", "1,200,000 devices are more than 1,048,576. Give fewer."),
        ("100xh100", "has 8 devices, and 100 is not a multiple of that. Try 96xh100 or 104xh100, or give the nodes"),
        ("8xh1000", "no device is called 'h1000'; did you mean h100"),
        ("h100x8", "neither NxDEVICE, such as 8xh100, nor a .toml file, nor a preset"),
        ("two-site", "did you mean two-sites?"),
        ("none.toml", "none.toml: cannot be read"),
    ],
)
def test_a_bad_name_says_what_would_do(text, message):
    with pytest.raises(UserError) as error:
        Cluster.parse(text)
    assert message in str(error.value)


GROUP = '[[groups]]\ndevice = "h100"\nnodes = 8\n'
TIER = '[[network]]\nname = "leaf"\nbandwidth_bytes_per_s = 5e10\nlatency_s = 1e-5\ndevices = '


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mine.toml: no [[groups]]"),
        ("groups = 3", "mine.toml: no [[groups]]"),
        ("groups = []", "mine.toml:1: groups: a cluster needs at least one"),
        (GROUP.replace("8", "0"), "mine.toml:3: groups[0].nodes = 0: must be a whole number above 0."),
        (
            GROUP.replace("h100", "h1000"),
            "mine.toml:2: groups[0].device: no device is called 'h1000'; did you mean h100",
        ),
        (GROUP.replace("nodes", "node"), "mine.toml:3: groups[0].node = 8: unknown key; did you mean nodes?"),
        ("pues = 2\n" + GROUP, "mine.toml:1: pues = 2: unknown key; did you mean pue?"),
        ("pue = 0.9\n" + GROUP, "mine.toml:1: pue = 0.9: must be a finite number of at least 1."),
        (GROUP + TIER + "32", "mine.toml:4: network ends in a tier of 32 devices, and a site has 64"),
        (GROUP + TIER + "8", "mine.toml:4: network must hold more devices from tier to tier, and has [8, 8]"),
        (GROUP + 'site = "a"\n' + GROUP, "mine.toml: links joins nothing to the site 'a'; add [[links]]"),
        (
            GROUP + '[[links]]\nsites = ["a", "here"]\nbandwidth_bytes_per_s = 1e9\nlatency_s = 1e-2',
            "mine.toml:4: links names the site 'a', and groups has here.",
        ),
        ("[factors]\ncompute = {value = 1, sd = 2}\n" + GROUP, "mine.toml:2: factors.compute.sd = 2: unknown key;"),
        ('currency = "EUR"\n' + GROUP, "mine.toml:1: currency is EUR"),
        (
            GROUP + "devices_per_node = 1_000_000_000_000_000_000",
            "groups have 8,000,000,000,000,000,000 devices, more than 1,048,576; give fewer nodes",
        ),
        (GROUP + '[groups.device]\nname = "x"', "mine.toml"),
        (GROUP + f"devices_per_node = 1{'0' * 400}", "TOML's whole numbers have 64 bits, and this is larger"),
    ],
)
def test_a_wrong_file_is_told_with_its_line(refusal, text, message):
    assert message in refusal(text)


def test_a_site_of_a_cluster_is_a_cluster() -> None:
    east = Cluster.parse("two-sites").of_site("east")
    assert (east.devices, east.sites, east.links) == (64, {"east": 64}, ())
    assert [tier.name for tier in east.tiers] == ["node", "network"]
