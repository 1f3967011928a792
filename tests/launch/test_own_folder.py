"""A run's folder belongs to one run, and a refused run leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from argosy.errors import RunFailed, UserError
from argosy.launch import run_folder
from argosy.launch.own_folder import check_is_own


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("names", [["notes.txt"], ["run.toml"], [".git", "run.toml", ".lock"], ["tokenizer.json", "a"]])
def test_a_folder_of_somebody_else_is_refused_and_left_as_it_was(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text("mine")
    with (
        pytest.raises(UserError, match=r"is not the folder of a run: it holds .* --run-dir"),
        run_folder.locked(tmp_path),
    ):
        pass
    assert files(tmp_path) == set(names)


@pytest.mark.parametrize(
    "names",
    [
        [],
        [".lock", ".settling", ".secret"],
        [".lock", ".secret", "tls", "tls-1.partial"],
        [".lock-a-0", ".lock-b-0", "tokenizer.json.partial"],
        [".lock", "tokenizer.json", "run.toml", "logs"],
        ["run.toml", "plan.toml", "what I noticed.txt"],
    ],
)
def test_a_run_s_own_folder_is_entered_be_it_only_begun(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text("")
    check_is_own(tmp_path)


def test_a_path_that_is_a_file_or_leads_through_one_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with (
            pytest.raises(UserError, match=r"file is a file, and a run needs a folder.*--run-dir"),
            run_folder.locked(path),
        ):
            pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    def refuse(path, mode=0o777, dir_fd=None):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "mkdir", refuse)  # root may write anywhere
    with (
        pytest.raises(UserError, match=rf"Permission denied.*write in {tmp_path}, or"),
        run_folder.locked(tmp_path / "a"),
    ):
        pass


def test_a_refused_run_leaves_nothing_behind(tmp_path):
    with pytest.raises(UserError, match="wrong"), run_folder.locked(tmp_path / "runs" / "mine"):
        raise UserError("wrong")
    assert not files(tmp_path)


def test_a_folder_that_another_process_was_faster_to_take_is_left_to_it(tmp_path, monkeypatch):
    run_dir = tmp_path / "mine"
    with run_folder.locked(run_dir):
        monkeypatch.setattr(Path, "iterdir", lambda path: iter(()))  # as if it had been seen before the other made it
        with pytest.raises(UserError, match="in use by process"), run_folder.locked(run_dir):
            pass
        assert (run_dir / ".lock").exists()


@pytest.mark.parametrize("kept", ["it was there", "it failed later", "steps were done", "others are in it"])
def test_what_is_worth_something_stays(tmp_path, kept):
    run_dir = tmp_path / "mine"
    if kept == "it was there":
        run_dir.mkdir()
        (run_dir / ".lock").touch()
    error = RunFailed if kept == "it failed later" else UserError
    with pytest.raises(error), run_folder.locked(run_dir, nodes=2 if kept == "others are in it" else 1):
        if kept == "steps were done":
            (run_dir / "metrics.jsonl").write_text("{}\n")
        raise error("wrong")
    assert (run_dir / ".lock").exists()
