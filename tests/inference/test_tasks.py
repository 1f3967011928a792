"""A trained model is scored on tasks in one process and in several, and its folder keeps the scores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import argosy
from argosy.cli import main
from argosy.config.dump import save_run
from argosy.config.load import load
from argosy.errors import UserError
from argosy.inference.evaluate import SCORES_FILE, evaluate_tasks
from argosy.observe.events import read_lines
from tasks import CHOICES, task_file

pytestmark = pytest.mark.filterwarnings("ignore::argosy.errors.ArgosyWarning")  # few cores


@pytest.fixture
def run_dir(trained: Path) -> Path:
    (trained / SCORES_FILE).unlink(missing_ok=True)
    return trained


def test_scores_are_the_same_in_two_processes_and_kept_with_the_run(run_dir: Path, tmp_path: Path):
    choices = task_file(tmp_path, "choices", "multiple_choice", CHOICES)
    alone, together = (evaluate_tasks(run_dir, [str(choices)], seq_len=64, plan=plan) for plan in ("", "tp=2"))
    assert alone == together
    kept = read_lines(run_dir / SCORES_FILE)
    assert [(line["step"], line["tasks"], line["limit"]) for line in kept] == [(39, alone, 0)] * 2


def test_a_task_in_which_the_model_writes_gets_its_likeliest_text(run_dir: Path, tmp_path: Path):
    with argosy.load_model(run_dir) as model:
        prompt = model.tokenizer.encode("def f0():")
        (text,) = model.generate([prompt], max_tokens=6, temperature=0.0)
    settings = "generation_kwargs:\n  max_gen_toks: 6\n  until: ['@@']\n"
    more = f"  - metric: exact_match\n{settings}doc_to_target: {json.dumps(text)}\n"
    file = task_file(tmp_path, "writes", "generate_until", more)
    assert evaluate_tasks(run_dir, [str(file)], limit=1, seq_len=64)["writes"]["exact_match"] == 1.0


def test_code_in_a_task_file_runs_for_those_alone_who_trust_it(run_dir: Path, tmp_path: Path):
    (tmp_path / "tricks.py").write_text("def right(doc):\n    return doc['answer']\n")
    file = task_file(tmp_path, "coded", "multiple_choice", CHOICES)
    file.write_text(file.read_text().replace("doc_to_target: answer", "doc_to_target: !function tricks.right"))
    with pytest.raises(UserError, match="brings code of its own"):
        evaluate_tasks(run_dir, [str(file)], seq_len=64)
    assert "acc" in evaluate_tasks(run_dir, [str(file)], seq_len=64, trust_code=True)["coded"]


def test_a_list_that_names_no_task_is_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["evaluate", str(run_dir), "--tasks", " ,"]) == 2
    assert "tasks: none is named" in capsys.readouterr().err and not (run_dir / SCORES_FILE).exists()


def test_a_reward_model_is_asked_for_no_words(run_dir: Path, tmp_path: Path):
    copy = shutil.copytree(run_dir, tmp_path / "run")
    save_run(load(copy / "run.toml").with_keys(model={"score": True}), copy / "run.toml")
    with pytest.raises(UserError, match="is a reward model"):
        evaluate_tasks(copy, ["arc_easy"], seq_len=64)


def test_what_only_tasks_have_and_questions_beyond_the_context_are_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["evaluate", str(run_dir), "--fewshot", "3"]) == 2
    assert "--fewshot are of --tasks" in capsys.readouterr().err
    with pytest.raises(UserError, match="is more than model"):
        evaluate_tasks(run_dir, ["arc_easy"], seq_len=100_000)
