"""`argosy simulate`, as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from commands import Folder


@pytest.mark.slow
def test_any_rank_of_a_run_file_is_simulated_on_its_own_data(folder: Folder, refused: Callable[..., str]) -> None:
    folder.write_run()
    words = ("simulate", "run.toml", "--plan", "dp_shard=4,zero=1")
    (found,) = folder.documents(*words, "--rank", 3, "--trace", "step.json", here=False)
    assert found["rank"] == 3 and found["memory"]["at_peak"]["parameters"] > 0
    assert {row["collective"] for row in found["traffic"]} == {"all_reduce", "all_gather", "reduce_scatter"}
    assert json.loads((folder.path / "step.json").read_text())["traceEvents"]
    assert not (folder.path / "runs").exists()
    refused(*words, "--rank", 4, said=("--rank 4", "0 to 3"))
