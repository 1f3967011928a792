"""The journal counts each trial once, whatever was killed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from argosy.errors import UserError
from argosy.sweep.load import Sweep, load_sweep
from argosy.sweep.study import STUDY_JOURNAL, Study

RANGES = """
optimizer.lr = { min = 1e-4, max = 1e-1, log = true }
train.global_batch = { min = 8, max = 64, step = 8 }
optimizer.kind = ["adamw", "lion"]
"""
LISTS = "optimizer.kind = ['adamw', 'lion']\nseed = [1, 2, 3]\n"


def sweep(folder: Path, method: str, parameters: str = RANGES) -> Sweep:
    path = folder / "s.toml"
    path.write_text(f"method = '{method}'\n[parameters]\n{parameters}\n[run.train]\nsteps = 90\n")
    return load_sweep(path)


@pytest.mark.parametrize("method", ["random", "tpe", "grid", "halving"])
def test_a_sweep_that_is_opened_again_before_each_trial_proposes_the_same(tmp_path: Path, method: str) -> None:
    asked = sweep(tmp_path, method, LISTS if method == "grid" else RANGES)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = Study(tmp_path / "a", asked)
    for number in range(6):
        once = whole.propose()
        again = Study(tmp_path / "b", asked).propose()
        assert once.values == again.values and once.number == again.number == number
        metric = once.values.get("optimizer.lr", number)
        whole.complete(number, metric)
        Study(tmp_path / "b", asked).complete(number, metric)
    assert len({str(trial.values) for trial in whole.trials()}) == 6
    low = [trial.values.get("optimizer.lr", 1e-4) for trial in whole.trials()]
    assert all(1e-4 <= value <= 1e-1 for value in low)


def test_a_proposal_that_a_kill_cut_in_two_is_finished(tmp_path: Path) -> None:
    asked = sweep(tmp_path, "random")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    expected = Study(tmp_path / "a", asked).propose()
    Study(tmp_path / "b", asked).propose()
    journal = tmp_path / "b" / STUDY_JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])  # and the last line is not whole
    study = Study(tmp_path / "b", asked)
    assert study.trials() == []
    assert study.propose() == expected and len(study.trials()) == 1


def test_random_trials_of_lists_do_not_repeat(tmp_path: Path) -> None:
    study = Study(tmp_path, sweep(tmp_path, "random", LISTS))
    assert len({str(study.propose().values) for _ in range(6)}) == 6
    study.complete(0, 1.0)
    assert study.twin(study.propose()) is not None


def test_what_became_of_trials_is_read_by_another_process(tmp_path: Path) -> None:
    asked = sweep(tmp_path, "halving")
    study = Study(tmp_path, asked)
    for _ in range(3):
        study.propose()
    study.report(0, 10, 4.0)
    study.stop(0)
    study.fail(1, "the disk is full")
    study.complete(2, 3.0)
    before = (tmp_path / STUDY_JOURNAL).read_bytes()
    stopped, failed, done = Study(tmp_path, asked, may_write=False).trials()
    assert (stopped.state, stopped.metric, stopped.rungs) == ("stopped", 4.0, {10: 4.0})
    assert (failed.state, failed.reason) == ("failed", "the disk is full")
    assert (done.state, done.metric) == ("done", 3.0)
    assert (tmp_path / STUDY_JOURNAL).read_bytes() == before


def test_the_parameter_that_decides_is_important(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study(tmp_path, sweep(tmp_path, "random"))
    for number in range(30):
        lr = study.propose().values["optimizer.lr"]
        study.complete(number, abs(lr - 1e-2))
    optuna = pytest.importorskip("optuna.importance")
    usual = optuna.get_param_importances
    evaluators: list[Any] = []

    def asked(*args: Any, evaluator: Any = None) -> dict[str, float]:
        evaluators.append(evaluator)
        return usual(*args, evaluator=evaluator)

    monkeypatch.setattr(optuna, "get_param_importances", asked)
    shares = study.importance()
    assert [type(each).__name__ for each in evaluators] == ["PedAnovaImportanceEvaluator"]
    assert max(shares, key=shares.__getitem__) == "optimizer.lr" and sum(shares.values()) == pytest.approx(1)


def test_without_optuna_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = sweep(tmp_path, "random")
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r"pip install 'argosy\[sweep\]'"):
        Study(tmp_path, asked)
    assert not (tmp_path / STUDY_JOURNAL).exists()


def test_a_trial_with_the_values_of_another_has_its_result(tmp_path: Path) -> None:
    study = Study(tmp_path, sweep(tmp_path, "random", "seed = [1]\n"))
    study.propose()
    again = study.propose()
    twin = study.twin(again)
    assert twin is not None and twin.number == 0
    study.complete(0, 2.5)
    study.copy_result(1, study.trials()[0])
    copied = study.trials()[1]
    assert (copied.state, copied.metric, copied.same_as) == ("done", 2.5, 0)
