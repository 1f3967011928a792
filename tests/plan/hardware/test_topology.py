"""A topology adds up with the nodes that it joins, or is refused with what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.errors import UserError
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.topology import Topology, hosts_of, near_cube

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "networks").glob("*.toml"))
NODES = '[[groups]]\ndevice = "h100"\nnodes = 16\n'
DEVICES = '[[groups]]\ndevice = "tpu-v4"\nnodes = 1\ndevices_per_node = 64\n'


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_adds_up_and_is_written_as_it_was_read(path, tmp_path):
    cluster = Cluster.load(path)
    assert cluster.topology is not None
    cluster.save(tmp_path / "again.toml")
    assert Cluster.load(tmp_path / "again.toml") == cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (NODES + 'kind = "mesh"', 'mine.toml:5: topology.kind = "mesh": must be one of "fat-tree", '),
        (NODES + 'kind = "fat-tree"', 'topology.kind = "fat-tree" needs nodes_per_leaf; add it.'),
        (
            NODES + 'kind = "fat-tree"\nnodes_per_leaf = 2\ndims = [2, 2]',
            'dims is no key of kind = "fat-tree"; remove it',
        ),
        (NODES + 'kind = "fat-tree"\nnodes_per_leaf = 17', "topology.nodes_per_leaf = 17, and groups have 16 nodes"),
        (
            NODES + 'kind = "fat-tree"\nnodes_per_leaf = 4\nnodes_per_pod = 6',
            "is no multiple of nodes_per_leaf = 4; write 8",
        ),
        (
            NODES + 'kind = "fat-tree"\nnodes_per_leaf = 8\nswitch_ports = 64',
            "switch_ports = 64: a switch has 64 adapters and 64 links to spines, 128 in all; take larger switches",
        ),
        (
            NODES + 'kind = "fat-tree"\nnodes_per_leaf = 4\noversubscription = 0.5',
            "must be a finite number of at least 1",
        ),
        (NODES + 'kind = "rail-only"\nnodes_per_leaf = 4', 'nodes_per_leaf is no key of kind = "rail-only"'),
        (NODES + 'kind = "rail-only"\nswitch_ports = 4', "joins 8 nodes, and groups have 16"),
        (
            NODES + 'kind = "dragonfly"\nnodes_per_router = 1\nrouters_per_group = 2\nglobal_links = 1',
            "groups cannot all be joined by routers_per_group x global_links = 2 links of each; write global_links = 4",
        ),
        (
            NODES + 'kind = "dragonfly"\nnodes_per_router = 3\nrouters_per_group = 1\nglobal_links = 5',
            "= 3 nodes do not divide the 16 nodes; take 15 nodes, or other groups",
        ),
        (
            NODES + 'kind = "dragonfly"\nnodes_per_router = 8\nrouters_per_group = 4\nglobal_links = 1',
            "= 32 nodes do not divide the 16 nodes; take 32 nodes, or other groups",
        ),
        (DEVICES + 'kind = "torus"', 'kind = "torus" needs dims; add it'),
        (
            DEVICES + 'kind = "torus"\ndims = [4, 4, 8]',
            "dims = [4, 4, 8] hold 128 devices, and a site has 64; write dims whose product is 64, as [4, 4, 4]",
        ),
        (
            DEVICES + 'kind = "torus"\ndims = [8, 8]\nlink_bytes_per_s = 50e12',
            "link_bytes_per_s = 5e+13 is more than the memory's",
        ),
        (DEVICES + 'kind = "torus"\ndims = [2, 2, 2, 8]', "one to three dimensions are known"),
        (
            DEVICES + 'kind = "torus"\ndims = [8, 8]\nalgorithms = ["sharp"]',
            "has no switches that could sum; remove it",
        ),
        (
            DEVICES + 'kind = "optical"\nblock = [4, 4, 3]',
            "has 48 devices, of which 64 is no multiple; take groups of 48",
        ),
        (NODES + 'kind = "optical"', "an optical switch needs either block, as [4, 4, 4], or circuits"),
        (
            NODES + 'kind = "optical"\ncircuits = 16',
            "topology.circuits = 16: a node has only 15 others; write 15 or less",
        ),
        (
            NODES + 'kind = "fat-tree"\nnodes_per_leaf = 4\npod_oversubscription = 2',
            "pod_oversubscription = 2 without nodes_per_pod",
        ),
        (NODES + 'kind = "rail-only"\nhosts = "n[1-8]"', "topology.hosts has 8 names, and groups have 16 machines"),
        (NODES + 'kind = "rail-only"\nhosts = "n[1-15],n3"', 'topology.hosts has "n3" twice; name each machine once'),
        (NODES + 'kind = "rail-only"\nhosts = "n[8-1]"', 'whose range "8-1" is none; write node[001-128]'),
        (NODES + 'kind = "rail-only"\nhosts = "n$(x)"', "which is no list of names"),
        (NODES + 'kind = "rail-only"\nhosts = "n[1-9999999]"', "more than 1,000,000 names"),
        (
            NODES.replace("16", "8") + NODES + 'devices_per_node = 4\n[topology]\nkind = "rail-only"',
            "nodes of one size",
        ),
    ],
)
def test_what_does_not_add_up_is_refused_with_a_remedy(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    table = text if "[topology]" in text else text.replace("kind", "[topology]\nkind", 1)
    Path("mine.toml").write_text(table)
    with pytest.raises(UserError) as refused:
        Cluster.load(Path("mine.toml"))
    assert message in str(refused.value) and str(refused.value).startswith("mine.toml")


def test_topology_and_levels_are_two_answers_to_one_question(tmp_path):
    tier = '[[network]]\nname = "leaf"\ndevices = 128\nbandwidth_bytes_per_s = 5e10\nlatency_s = 8e-6\n'
    (tmp_path / "both.toml").write_text(NODES + tier + '[topology]\nkind = "rail-only"\n')
    with pytest.raises(UserError, match="topology and network are both given"):
        Cluster.load(tmp_path / "both.toml")


def test_names_of_machines_are_read_as_slurm_writes_them():
    assert list(hosts_of("n[08-10,2],login,a[1-2]-ib")) == ["n08", "n09", "n10", "n2", "login", "a1-ib", "a2-ib"]


def test_slurm_gets_the_tree_of_switches():
    names = tuple(f"n{i}" for i in range(8))
    tree = Topology(kind="fat-tree", nodes_per_leaf=2, nodes_per_pod=4).slurm(names, 1).splitlines()
    assert tree[0] == "SwitchName=leaf0 Nodes=n0,n1" and tree[3] == "SwitchName=leaf3 Nodes=n6,n7"
    assert tree[4:] == [
        "SwitchName=pod0 Switches=leaf0,leaf1",
        "SwitchName=pod1 Switches=leaf2,leaf3",
        "SwitchName=spine Switches=pod0,pod1",
    ]
    of_racks = Topology(kind="fat-tree", nodes_per_leaf=1).slurm(names, 4).splitlines()
    assert of_racks == ["SwitchName=leaf0 Nodes=n0,n1,n2,n3", "SwitchName=leaf1 Nodes=n4,n5,n6,n7",
                        "SwitchName=spine Switches=leaf0,leaf1"]  # fmt: skip
    with pytest.raises(ValueError, match="is no tree"):
        Topology(kind="torus", dims=(8,)).slurm(names, 1)


def test_a_site_keeps_its_topology_and_its_names():
    both = Cluster.load(next(path for path in EXAMPLES if path.stem == "two-sites"))
    west = both.of_site("west")
    assert west.topology is not None and west.topology.kind == "rail-optimized"
    assert list(hosts_of(west.topology.hosts)) == [f"west{n:02d}" for n in range(1, 17)]


def test_dimensions_near_a_cube():
    assert near_cube(4096, 3) == (16, 16, 16)
    assert near_cube(512, 2) == (16, 32)
