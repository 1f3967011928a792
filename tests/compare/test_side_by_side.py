"""Two runs are compared where both have something to compare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from argosy.compare.side_by_side import Comparison, charts, compare, in_text
from argosy.watch.reader import RunReader
from run_folder import RunFolder
from watched import H100


def made(folder: Path, losses: list[float]) -> RunReader:
    run = RunFolder(folder)
    run.event("start", step=0, world_size=1)
    for step, loss in enumerate(losses):
        run.step(step, loss=loss)
    return RunReader.read(folder)


def test_losses_stand_at_equal_tokens_and_time(tmp_path: Path) -> None:
    a = made(tmp_path / "a", [5.0 - 0.1 * step for step in range(40)])
    b = made(tmp_path / "b", [5.0 - 0.05 * step for step in range(20)])
    found = compare(a, b)
    by_tokens = next(curve for curve in found.curves if curve.of == "tokens")
    assert by_tokens.at[0] == 256 and by_tokens.at[-1] == 20 * 256
    assert by_tokens.b[-1] - by_tokens.a[-1] == pytest.approx(0.05 * 19)
    assert {curve.of for curve in found.curves} >= {"tokens", "time"}
    assert Comparison.model_validate_json(found.model_dump_json()) == found
    text = "\n".join(in_text(found))
    assert "loss at equal tokens" in text and "B - A" in text
    assert len(list(charts(a, b, found))) > 20


def test_only_settings_that_differ_are_told(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a", [3.0]), made(tmp_path / "b", [3.0])
    assert compare(a, b).settings == []
    text = (tmp_path / "b/run.toml").read_text()
    (tmp_path / "b/run.toml").write_text(
        text.replace("seed = 0", "seed = 5").replace('name = "tiny"', 'name = "other"')
    )
    b.refresh()
    assert [(each.key, each.a, each.b) for each in compare(a, b).settings] == [("seed", 0, 5)]


def test_code_that_both_have_a_copy_of_is_no_difference(tmp_path: Path) -> None:
    for name in ("a", "b"):
        made(tmp_path / name, [3.0])
        (tmp_path / name / "mine.py").write_text(
            "from argosy import extend\n\n\n@extend.callback('end')\ndef f(run): pass\n"
        )
        text = (tmp_path / name / "run.toml").read_text()
        (tmp_path / name / "run.toml").write_text(text.replace("files = []", 'files = ["mine.py"]'))
    a, b = (RunReader.read(tmp_path / name) for name in ("a", "b"))
    assert a.run is not None and a.run.extend.files and compare(a, b).settings == []


def test_runs_that_have_nothing_in_common_are_said_to_have_nothing(tmp_path: Path) -> None:
    found = compare(made(tmp_path / "a", [3.0, float("nan")]), made(tmp_path / "b", []))
    assert not found.curves and "no loss can be compared" in "\n".join(in_text(found))
    assert json.loads(found.model_dump_json())["a"]["loss"] is None


def test_reward_models_are_compared_by_their_accuracy_too(tmp_path: Path) -> None:
    a, b = (RunFolder(tmp_path / name) for name in ("a", "b"))
    for run, accuracy in ((a, 0.7), (b, 0.8)):
        run.step(0, 1, loss=0.5)
        run.evaluation(1, 0.5, validation_accuracy=accuracy)
    text = list(in_text(compare(RunReader.read(a.path), RunReader.read(b.path))))
    assert any(line.split() == ["accuracy", "70.0%", "80.0%"] for line in text)
    plain = made(tmp_path / "c", [3.0])
    assert not any(line.startswith("accuracy") for line in in_text(compare(plain, plain)))


def test_steps_cost_by_the_devices_that_they_were_made_on(tmp_path: Path) -> None:
    """8 devices at first, 4 after a resize; or 8 all the time."""
    runs = []
    for name, later in (("a", 4), ("b", 8)):
        run = RunFolder(tmp_path / name)
        for step, size in ((0, 8), (10, later)):
            run.event("start", step=step, world_size=size, hardware=vars(H100))
        run.step(*range(20), loss=3.0)
        runs.append(RunReader.read(run.path))
    found = compare(*runs)
    assert found.a.cost and found.b.cost
    assert found.a.cost == pytest.approx(0.75 * found.b.cost)
    by_cost = next(curve for curve in found.curves if curve.of == "cost")
    assert by_cost.at[-1] == pytest.approx(found.a.cost, rel=1e-5)
    assert next(row for row in in_text(found) if row.startswith("cost of steps")).endswith(" USD")
