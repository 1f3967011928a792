"""Where the time of steps goes, and what replicas sent to agree."""

from __future__ import annotations

import json
from pathlib import Path

from argosy.plan.plan import Plan
from argosy.watch.reader import RunReader
from argosy.watch.steps import memory, step_parts

PREDICTED = """
[prediction]
cluster = "this CPU"
step_s = [0.1, 0.15, 0.3]
memory_bytes = [1e6, 2e6, 3e6]
seconds = {matmul = 0.15}
memory = {weights = 1e6}
traffic = {}
"""


def line(step: int, **more: object) -> str:
    seconds = {"forward": 0.5, "other": 0.5, "step": 1.0}
    return json.dumps({"step": step, "loss": 1.0, "step_time_s": 1.0, "seconds": seconds, **more})


def test_figures_of_agreement_are_means_of_the_lines_that_have_them(tmp_path: Path) -> None:
    tables = [{"bytes": 10 * n, "seconds": 0.5, "ratio": 0.02, "staleness": 50} for n in (1, 3)]
    lines = [line(step, **({"sync": tables[step // 50]} if step % 50 == 49 else {})) for step in range(100)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    reader = RunReader.read(tmp_path)
    assert step_parts(reader)["sync"] == {"bytes": 20.0, "seconds": 0.5, "ratio": 0.02, "staleness": 50.0}
    assert step_parts(reader, 0, 49)["sync"]["bytes"] == 10.0


def test_replicas_that_sum_exactly_have_none(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(line(0) + "\n")
    reader = RunReader.read(tmp_path)
    assert step_parts(reader)["sync"] == {}


def test_steps_of_another_plan_or_of_smaller_batches_are_not_held_against_the_prediction(tmp_path: Path) -> None:
    ramp = "[{until_step = 10, global_batch = 4}]"
    (tmp_path / "run.toml").write_text(f'name = "a"\n[train]\nsteps = 40\nglobal_batch = 8\nbatch_ramp = {ramp}\n')
    Plan(dp_replicate=2).save(tmp_path / "plan.toml", PREDICTED)
    (tmp_path / "events").mkdir()
    starts = [{"time_s": 1.0, "event": "start", "step": step, "plan": f"tp={step + 1}"} for step in (0, 25)]
    (tmp_path / "events/rank-0.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    lines = [
        line(step, seconds={"forward": took, "step": took}, step_time_s=took)
        for step, took in enumerate([1.0] * 10 + [2.0] * 15 + [4.0] * 5)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    reader = RunReader.read(tmp_path)
    found = step_parts(reader)
    assert found["measured"]["forward_backward"] == 4.0 and found["predicted"]["forward_backward"] == 0.15
    for first, last in ((0, 9), (0, 24)):
        found = step_parts(reader, first, last)
        assert found["predicted"] == {} and found["words"] == "" and found["measured"]["forward_backward"] > 0


def test_each_site_s_part_in_the_rounds_is_told(tmp_path: Path) -> None:
    rounds = [{"A": 1.0, "B": 2.0}, {"A": 3.0}]
    tables = [
        {"round": n, "participants": list(norms), "norms": norms, "spread": dict.fromkeys(norms, 0.5)}
        for n, norms in enumerate(rounds)
    ]
    lines = [line(step, **({"sites": tables[step // 50]} if step % 50 == 49 else {})) for step in range(100)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    reader = RunReader.read(tmp_path)
    assert step_parts(reader)["sites"] == [
        {"site": "A", "rounds": 2, "of_rounds": 2, "norm": 2.0, "spread": 0.5},
        {"site": "B", "rounds": 1, "of_rounds": 2, "norm": 2.0, "spread": 0.5},
    ]
    assert step_parts(reader, 0, 48)["sites"] == []


def test_memory_of_ranks_is_that_of_the_newest_world(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(line(0) + "\n")
    (tmp_path / "nodes").mkdir()
    for generation, (node, ranks) in enumerate((("left", [0, 1, 2]), ("here", [0, 1]))):
        told = {"time_s": 1.0 + generation, "generation": generation, "ranks": ranks, "memory_bytes": [7] * len(ranks)}
        (tmp_path / "nodes" / f"{node}.jsonl").write_text(json.dumps(told) + "\n")
    by_rank = memory(RunReader.read(tmp_path))["by_rank"]
    assert (by_rank["ranks"], by_rank["nodes"]) == ([0, 1], ["here", "here"])
