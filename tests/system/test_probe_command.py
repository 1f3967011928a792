"""`argosy probe`, as a user runs it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from argosy.plan.hardware.clusters import Cluster
from commands import Folder


@pytest.mark.slow
def test_it_writes_a_cluster_that_plans_are_made_for(folder: Folder) -> None:
    folder.write_run()
    words = ("probe", "--run", "run.toml", "--processes", 2, "--minutes", 0.02, "--out", "mine.toml")
    (said,) = folder.documents(*words, here=False)
    cluster = Cluster.load(folder.path / "mine.toml")
    assert said["name"] == cluster.name
    assert (cluster.nodes, cluster.devices_per_node) == (1, 2)
    assert {row.operation for row in cluster.measured.collectives} >= {"all_reduce", "all_gather", "send"}
    assert cluster.measured.loader_tokens_per_s and not (folder.path / "cluster.toml").exists()


def test_wrong_input_is_refused_before_anything_is_measured(folder: Folder, refused: Callable[..., str]) -> None:
    refused("probe", "--model", "llama3-8", said=("llama3-8b",))
    refused("probe", "--device", "h10", said=("h100",))
    refused("probe", "--out", "none/cluster.toml", said=("there is no folder",))
    refused("probe", "--site", "oslo", said=("--site oslo", "--run"))
    folder.write_run()
    refused("probe", "--run", "run.toml", "--site", "oslo", said=("no [[sites]]",))
    refused("probe", "--minutes", 0, said=("--minutes must be above 0",))
