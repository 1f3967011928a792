"""The run's secret: made once, by whoever is first, and refused where others could know it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from argosy.errors import UserError
from argosy.processes.secret import FILE, NAME, VALUE, secret_of


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VALUE, FILE):
        monkeypatch.delenv(name, raising=False)


def test_all_who_ask_at_once_get_the_same_and_nobody_else_can_read_it(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        found = set(pool.map(secret_of, [tmp_path] * 64))
    assert len(found) == 1 and len(found.pop()) == 64
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == [NAME]


def test_two_runs_have_different_ones(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    assert secret_of(tmp_path / "a") != secret_of(tmp_path / "b")


def test_one_that_is_given_is_taken_and_none_is_written(tmp_path, monkeypatch):
    given = "s" * 32
    (tmp_path / "given").write_text(given + "\n")
    (tmp_path / "given").chmod(0o600)
    monkeypatch.setenv(FILE, str(tmp_path / "given"))
    assert secret_of(tmp_path) == given.encode()
    monkeypatch.setenv(VALUE, "t" * 32)
    assert secret_of(tmp_path) == b"t" * 32 and not (tmp_path / NAME).exists()


def test_a_file_that_others_may_read_is_refused(tmp_path):
    secret_of(tmp_path)
    (tmp_path / NAME).chmod(0o644)
    with pytest.raises(UserError, match=r"mode 0644.*Try: chmod 600 .*\.secret"):
        secret_of(tmp_path)


def test_one_that_could_be_guessed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(VALUE, "hunter2")
    with pytest.raises(UserError, match=r"ARGOSY_SECRET: .* fewer than 32 characters"):
        secret_of(tmp_path)


@pytest.mark.parametrize("content", [None, b"\xff\xfe" * 40], ids=["missing", "no text"])
def test_one_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None):
    path = tmp_path / "given"
    if content is not None:
        os.close(os.open(path, os.O_CREAT, 0o600))
        path.write_bytes(content)
    monkeypatch.setenv(FILE, str(path))
    with pytest.raises(UserError, match=r"ARGOSY_SECRET_FILE = .*given: .* cannot be read"):
        secret_of(tmp_path)


def test_a_folder_that_takes_none_is_named(tmp_path):
    with pytest.raises(UserError, match=r"\.secret: .* cannot be kept there .* set ARGOSY_SECRET_FILE"):
        secret_of(tmp_path / "missing")
