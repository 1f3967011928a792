"""Steps that are recorded with torch's profiler: the same numbers, and a summary beside the traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from argosy.observe.events import Metrics, read_lines
from argosy.parallel.world import World
from argosy.training.services.profiling import Profiling
from argosy.training.summary import StepFigures
from tiny import EAGER, eager, losses, run_config, train_in

ALONE = World()


def profiled(corpus: Path, **profile: Any):
    return run_config(corpus, observe={"profile": {"steps": "3:6", **profile}})


def summary_of(run_dir: Path) -> dict[str, Any]:
    found = json.loads((run_dir / "profiles" / "step-00000003-00000006" / "summary.json").read_text())
    assert isinstance(found, dict)
    return found


def numbers(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(r["loss"], r["grad_norm"]) if "loss" in r else (r["validation_loss"],) for r in records]


@pytest.mark.parametrize(
    ("plan", "axes"),
    [
        ("dp_replicate=2,microbatch=2", {"replicate"}),
        pytest.param("dp_shard=2,zero=3,tp=2,microbatch=4", {"shard", "tp"}, marks=pytest.mark.slow),
        ("pp=2,schedule=1f1b,microbatch=2", {"pp"}),
    ],
)
def test_the_numbers_are_those_of_a_run_without_bit_for_bit(workers, corpus, tmp_path, plan, axes):
    size = eager(plan).world_size
    without = workers.run(size, train_in, run_config(corpus), eager(plan), tmp_path / "without")[0]
    records = workers.run(size, train_in, profiled(corpus, ranks="all"), eager(plan), tmp_path / "with")[0]
    assert numbers(records) == numbers(without)
    assert [record["step"] for record in records if record.get("profiled")] == [3, 4, 5]
    found = summary_of(tmp_path / "with")
    assert found["steps"] == [3, 5] and list(found["ranks"]) == [str(rank) for rank in range(size)]
    for rank in found["ranks"].values():
        assert axes <= set(rank["communication"]), rank["communication"]
        assert rank["step_s"] > 0 and rank["operations"][0]["seconds"] > 0 and rank["memory_bytes"] > 0
        for figures in rank["communication"].values():
            assert 0 < figures["exposed_seconds"] <= figures["seconds"] * 1.001
            assert figures["predicted_exposed_seconds"] >= 0
        assert set(rank["parts"]) == {"forward_backward", "communication", "optimizer", "rest"}
        assert all(part["measured"] >= 0 and part["predicted"] >= 0 for part in rank["parts"].values())
    (event,) = (e for e in read_lines(tmp_path / "with" / "events" / "rank-0.jsonl") if e["event"] == "profile")
    assert event["steps"] == [3, 5] and event["ranks"] == list(range(size))


def test_a_trace_of_a_rank_can_be_read_and_has_its_parts(corpus, tmp_path, capsys):
    train_in(ALONE, profiled(corpus, stacks=True), EAGER, tmp_path)
    folder = tmp_path / "profiles" / "step-00000003-00000006"
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.json.gz", "summary.json"]
    trace = json.loads(gzip.decompress((folder / "rank-0.json.gz").read_bytes()))
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"argosy:step/3", "argosy:step/5", "argosy:part/forward", "aten::mm"} <= names
    assert "argosy:step/6" not in names
    said = capsys.readouterr().out
    assert "profile of steps 3 to 5, rank 0" in said and "forward + backward" in said and "longest operations" in said


def test_chosen_ranks_record_and_others_do_not(workers, corpus, tmp_path):
    plan = eager("dp_replicate=2,microbatch=2")
    workers.run(2, train_in, profiled(corpus, ranks="1"), plan, tmp_path)
    assert list(summary_of(tmp_path)["ranks"]) == ["1"]


def test_a_run_that_is_stopped_meanwhile_writes_what_it_has(corpus, tmp_path):
    train_in(ALONE, profiled(corpus), EAGER, tmp_path, stop_after=5)
    assert summary_of(tmp_path)["steps"] == [3, 4]


def test_profiled_steps_do_not_count_as_typical(corpus, tmp_path):
    train_in(ALONE, profiled(corpus), EAGER, tmp_path)
    measured = StepFigures(0)
    assert len(list(measured.steps(Metrics(tmp_path)))) == 8
    assert [record["step"] for record in measured.newest] == [0, 1, 2, 6, 7]


def test_steps_before_those_that_are_asked_for_are_not_marked_after_a_rewind(trainer, tmp_path):
    service = Profiling.of(trainer(observe={"profile": {"steps": "3:6"}}).parts)
    service.before_step(3, 8)
    assert service.line(3) == {"profiled": True}
    for step in range(2, 6):  # the run went back
        service.before_step(step, 8)
        assert service.line(step) == ({} if step == 2 else {"profiled": True})
        service.end_step(step, {})
    assert summary_of(tmp_path)["steps"] == [3, 5]


def test_what_cannot_be_written_does_not_stop_the_run(corpus, tmp_path):
    (tmp_path / "profiles").write_text("a file in the way")
    with pytest.warns(UserWarning, match="The run goes on"):
        records = train_in(ALONE, profiled(corpus), EAGER, tmp_path)
    assert len(losses(records)) == 8
