"""`argosy plan` says where ranks are on a network, and writes the files that put them there."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from argosy.cli.plan import main
from argosy.config.launch import read_rank_map
from argosy.errors import UserError
from argosy.plan.cost.collectives import all_reduce_s
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.topology import Topology
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.report.network import network_report, rank_map, slurm_topology
from argosy.plan.report.report import plan_report
from argosy.plan.report.request import Question, of_model
from argosy.plan.report.terminal import show

EXAMPLES = Path(__file__).parents[3] / "examples" / "networks"
ASKED = ("--global-batch", "512", "--seq-len", "4096", "--tokens", "1T")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_each_example_has_a_plan_whose_axes_are_on_the_network(path):
    asked = Question(
        global_batch=512, seq_len=4096, top=1, fix="tp=4|8,cp=1|2,schedule=1f1b,recompute=full,recompute_every=1"
    )
    report = plan_report(of_model("llama3-70b", str(path), asked))
    found = report.network
    assert found is not None and found.step_s <= found.in_order_step_s
    assert found.step_s == pytest.approx(float(report.explanation.choice.step_s.mid), rel=1e-6)
    plan = Plan.parse(report.explanation.choice.plan)
    for axis in found.axes:
        many = 1
        for _, each in axis.spans:
            many *= each
        assert many == axis.ranks == {"dp": plan.dp * plan.cp}.get(axis.axis) or getattr(plan, axis.axis)
        assert axis.seconds > 0
    out = io.StringIO()
    show(report, Console(file=out, width=200))
    assert f"Network, {found.kind}: " in out.getvalue()


def on_rails(*algorithms: str, model: str = "llama3.2-1b") -> CostModel:
    """Return the costs on 8 nodes of two leaves, whose sums may use these algorithms."""
    network = Topology(kind="rail-optimized", nodes_per_leaf=4, algorithms=algorithms)
    run = of_model(model, "64xh100", Question(global_batch=64, seq_len=2048)).run
    return CostModel.of(run, Cluster.parse("8x8xh100").changed(topology=network))


def of_gradients(costs: CostModel, plan: str) -> tuple[str, str]:
    """Return the collective and the algorithm that sum a plan's gradients."""
    found = network_report(costs, Plan.parse(plan))
    assert found is not None
    return found.axes[0].collective, found.axes[0].algorithm


def test_switches_that_sum_shorten_the_step_as_they_shorten_its_sum():
    plan = "dp_replicate=64,zero=0,microbatch=1,bucket_mb=64"
    both = on_rails("ring", "tree"), on_rails("ring", "tree", "sharp")
    assert [of_gradients(costs, plan) for costs in both] == [("all_reduce", "ring"), ("all_reduce", "sharp")]
    rows = Layouts.of([Plan.parse(plan)])
    waits = [float(np.asarray(costs.predict_time(rows).gradients)[0]) for costs in both]
    sums = [float(np.asarray(all_reduce_s(4.94e9, costs.step_model(rows).data_group))[0]) for costs in both]
    assert waits[1] / waits[0] == pytest.approx(sums[1] / sums[0], rel=0.1)


def test_a_gather_of_few_bytes_goes_tier_by_tier_if_it_may():
    """Rings through the 8 ranks of a node, then through 8 nodes, have fewer hops than one of 64."""
    used = [
        of_gradients(on_rails(*may, model="llama-5m"), "dp_shard=64") for may in (["ring"], ["ring", "hierarchical"])
    ]
    assert used == [("reduce_scatter", "ring"), ("reduce_scatter", "hierarchical")]


def test_a_cluster_without_a_topology_has_no_network_to_report():
    costs = CostModel.of(
        of_model("llama3-8b", "16xh100", Question(global_batch=64, seq_len=4096)).run, Cluster.parse("16xh100")
    )
    assert network_report(costs, Plan.parse("dp_shard=16,zero=3")) is None


def test_the_rank_map_names_the_machines_that_share_a_leaf_side_by_side():
    """A moved pipeline has its stages on neighbouring machines: ranks of one data-parallel index after the other."""
    cluster = Cluster.load(EXAMPLES / "fat-tree.toml")
    run = of_model("llama3-8b", str(EXAMPLES / "fat-tree.toml"), Question(global_batch=262144, seq_len=4096)).run
    costs, plan = CostModel.of(run, cluster), Plan.parse("dp_shard=32,tp=8,pp=4,zero=1,microbatch=1,precision=bf16")
    in_order = rank_map(replace(costs, is_in_order=True), cluster, plan)
    assert in_order == tuple(f"node{n:03d}" for n in range(1, 129))
    moved = rank_map(costs, cluster, plan)
    assert sorted(moved) == list(in_order) and moved != in_order
    assert moved[:3] == ("node001", "node005", "node009") and moved[32] == "node002", "stages of a replica share a leaf"


def test_the_command_writes_files_that_argosy_and_slurm_read(tmp_path, capsys):
    ranks, slurm = tmp_path / "ranks.txt", tmp_path / "topology.conf"
    cluster = str(EXAMPLES / "fat-tree.toml")
    fixed = ("--fix", "tp=8,schedule=1f1b,recompute=full,recompute_every=1")
    main(["--model", "llama3-70b", "--cluster", cluster, *ASKED, *fixed, "--json", "--rank-map", str(ranks),
          "--slurm-topology", str(slurm)])  # fmt: skip
    assert json.loads(capsys.readouterr().out)["network"]["kind"] == "fat-tree"
    assert sorted(read_rank_map(str(ranks))) == [f"node{n:03d}" for n in range(1, 129)]
    lines = slurm.read_text().splitlines()
    assert lines[0] == "SwitchName=leaf0 Nodes=node001,node002,node003,node004"
    assert lines[-1] == "SwitchName=spine Switches=pod0,pod1,pod2,pod3" and len(lines) == 32 + 4 + 1


def test_each_site_has_its_own_switches_in_slurm_s_tree():
    lines = slurm_topology(Cluster.parse(str(EXAMPLES / "two-sites.toml"))).splitlines()
    assert lines[0].startswith("SwitchName=east-leaf0 Nodes=east01,") and lines[-2].startswith("SwitchName=west-spine ")
    assert lines[-1] == "SwitchName=sites Switches=east-spine,west-spine"
    assert not any("east" in line and "west" in line for line in lines[:-1])


@pytest.mark.parametrize(
    ("cluster", "option", "message"),
    [
        ("16xh100", "--rank-map", "--rank-map: cluster 16xh100 has no table topology"),
        (str(EXAMPLES / "optical-circuits.toml"), "--rank-map", "--rank-map: topology.hosts names no machines"),
        (str(EXAMPLES / "torus-3d.toml"), "--slurm-topology", 'topology.kind = "torus" is no tree'),
    ],
)
def test_files_that_cannot_be_written_are_refused(tmp_path, cluster, option, message):
    fixed = ("--fix", "schedule=1f1b,recompute=full,recompute_every=1")
    words = ["--model", "llama3-8b", "--cluster", cluster, *ASKED, *fixed]
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        main([*words, option, str(tmp_path / "file")])
    assert not list(tmp_path.iterdir())


def test_options_about_ranks_go_with_training_on_one_cluster(tmp_path):
    words = ["--model", "llama3-8b", "--rank-map", str(tmp_path / "ranks.txt")]
    with pytest.raises(UserError, match="--rank-map is about the ranks of a training plan"):
        main([*words, "--cluster", "8xh100", "--serve"])
    with pytest.raises(UserError, match="--rank-map takes one --cluster"):
        main([*words, "--cluster", "8xh100", "--cluster", "8xa100"])
