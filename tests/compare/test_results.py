"""Results of small runs are read from run folders and CSV files, and bad ones are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from argosy.compare.results import planned_size, read_results
from argosy.config.dump import save_run
from argosy.config.sync import SiteConfig
from argosy.data.manifest import TOKENIZER
from argosy.errors import UserError
from argosy.plan.parameters import parameters
from argosy.plan.scaling_law import RunResult
from tiny import run_config


def csv_file(folder: Path, text: str) -> Path:
    path = folder / "results.csv"
    path.write_text(text)
    return path


def run_folder(path: Path, *, steps_done: int = 8, tokenizer: str = "{}", validated: bool = True) -> Path:
    """A folder as a run of 8 steps leaves it."""
    path.mkdir()
    save_run(run_config(Path("no data")), path / "run.toml")
    (path / TOKENIZER).write_text(tokenizer)
    records: list[dict[str, Any]] = [{"step": step, "loss": 5.0} for step in range(steps_done)]
    if validated:
        records += [{"step": 3, "validation_loss": 4.5}, {"step": steps_done - 1, "validation_loss": 4.25}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_folders_and_files_are_read_together(tmp_path: Path) -> None:
    table = csv_file(tmp_path, "tokens, loss, parameters\n2e9,3.5,1e6\n\n4e9,3.25,1e6\n")
    found = read_results([run_folder(tmp_path / "run"), table])
    model = run_config(tmp_path).model
    assert found == [
        RunResult(parameters(model), 8 * 8 * 32, 4.25),
        RunResult(1e6, 2e9, 3.5),
        RunResult(1e6, 4e9, 3.25),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("parameters,token,loss\n1,2,3\n", r"results.csv:1: unknown column 'token'; did you mean tokens\?"),
        ("parameters,tokens\n1,2\n", "results.csv:1: column loss is missing"),
        ("parameters,tokens,loss,loss\n1,2,3,3\n", "results.csv:1: a column is named twice"),
        ("parameters,tokens,loss\n1,2,3\n1,2\n", "results.csv:3: 2 values for the 3 columns"),
        ("parameters,tokens,loss\n1,2,3\n1,2,low\n", "results.csv:3: loss = 'low': must be a finite number above 0"),
        ("parameters,tokens,loss\n1,-2,3\n", "results.csv:2: tokens = '-2'"),
        ("parameters,tokens,loss\n1,2,nan\n", "results.csv:2: loss = 'nan'"),
        ("", "results.csv:1: column parameters, tokens, loss is missing"),
    ],
)
def test_a_bad_table_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_results([csv_file(tmp_path, text)])


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.csv"):
        read_results([tmp_path / "none.csv"])
    with pytest.raises(UserError, match=r"not a run's folder"):
        read_results([tmp_path])


def test_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at step 6 of 8"):
        read_results([run_folder(tmp_path / "run", steps_done=6)])


def test_of_a_run_of_sites_one_site_is_to_be_named(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    sites = (SiteConfig(name="oslo"), SiteConfig(name="bergen"))
    save_run(run_config(tmp_path).with_keys(sites=sites), run / "run.toml")
    (run / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"each of its sites has losses of its own\. Name one, such as .*sites/oslo\."):
        read_results([run])


def test_a_run_without_held_out_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="validation_fraction"):
        read_results([run_folder(tmp_path / "run", validated=False)])


def test_losses_of_different_tokenizers_are_not_mixed(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / name, tokenizer=text) for name, text in (("a", "{}"), ("b", "[]"))]
    with pytest.raises(UserError, match="different tokenizers"):
        read_results(folders)


def test_a_planned_run_has_a_size(tmp_path: Path) -> None:
    run = run_config(tmp_path)
    save_run(run, tmp_path / "run.toml")
    assert planned_size(tmp_path / "run.toml") == (parameters(run.model), 8 * 8 * 32)
    save_run(run_config(tmp_path, model={"vocab_size": 0}), tmp_path / "open.toml")
    with pytest.raises(UserError, match=r"model\.vocab_size = 0"):
        planned_size(tmp_path / "open.toml")


def sweep_folder(path: Path, *losses: float | None) -> Path:
    """A folder as a sweep leaves it, with a trial for each loss; None: one that was not promoted."""
    path.mkdir()
    (path / "sweep.toml").write_text('method = "grid"\n')
    for number, loss in enumerate(losses):
        trial = run_folder(path / f"{number:04d}", steps_done=8 if loss is not None else 3)
        with (trial / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 7 if loss else 2, "validation_loss": loss or 9.0}) + "\n")
    return path


def test_of_a_sweep_the_best_trial_of_each_size_counts(tmp_path: Path) -> None:
    (found,) = read_results([sweep_folder(tmp_path / "s", 4.5, None, 4.0, 4.25)])
    assert found == RunResult(parameters(run_config(tmp_path).model), 8 * 8 * 32, 4.0)


def test_runs_on_preferences_are_refused(tmp_path: Path) -> None:
    trial = next(sweep_folder(tmp_path / "s", 0.4).glob("0*"))
    save_run(
        run_config(Path("no data")).with_keys(train={"objective": "reward"}, model={"score": True}), trial / "run.toml"
    )
    for given in (trial, tmp_path / "s"):
        with pytest.raises(UserError, match=r"it learns from preferences \(train.objective = reward\)"):
            read_results([given])


def test_a_sweep_of_which_no_trial_has_ended_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no trial of this sweep has come to its end"):
        read_results([sweep_folder(tmp_path / "s", None, None)])
