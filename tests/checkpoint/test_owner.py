"""If two runs want one place for their copies, one has it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from argosy.checkpoint.checksums import DamagedCheckpoint, signed
from argosy.checkpoint.owner import NAME_FILE, OWNER, claim, name_of
from argosy.errors import UserError

LOCAL = fsspec.filesystem("file")


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / f"run{number}" for number in range(8)]
    for folder in folders:
        folder.mkdir()
    return folders


def claims(fs: Any, place: str, runs: list[Path]) -> list[Path]:
    """All claim at once; return those that were not refused."""
    ready, owners = threading.Barrier(len(runs)), []

    def ask(run_dir: Path) -> None:
        ready.wait()
        try:
            claim(fs, place, run_dir)
        except UserError:
            return
        owners.append(run_dir)

    threads = [threading.Thread(target=ask, args=(run_dir,)) for run_dir in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return owners


def test_a_folder_keeps_its_name_and_each_has_another(runs):
    assert name_of(runs[0]) == name_of(runs[0]) != name_of(runs[1])


def test_a_name_that_a_user_wrote_counts_and_one_that_is_none_is_refused(runs):
    (runs[0] / NAME_FILE).write_text("the-big-run\n")
    assert name_of(runs[0]) == "the-big-run"
    (runs[0] / NAME_FILE).write_text("a" * 100)
    with pytest.raises(UserError, match=r"\.name: must hold at most 64 letters"):
        name_of(runs[0])


def test_of_many_that_claim_one_place_at_once_one_has_it(tmp_path, runs):
    for round_ in range(20):
        assert len(claims(LOCAL, str(tmp_path / f"there{round_}"), runs)) == 1


def test_where_nothing_is_created_exclusively_the_last_to_write_has_it_and_the_others_hear_of_it_later(runs):
    class Plain(MemoryFileSystem):
        def _open(self, path: str, mode: str = "rb", *more: Any, **settings: Any) -> Any:
            if "x" in mode:
                raise NotImplementedError("File mode not supported")
            return super()._open(path, mode, *more, **settings)

    fs = Plain(skip_instance_cache=True)
    assert claims(fs, "/plain", runs)
    again = []
    for run_dir in runs:
        try:
            claim(fs, "/plain", run_dir)
        except UserError:
            continue
        again.append(run_dir)
    assert len(again) == 1


def test_an_owner_that_a_dead_process_left_empty_is_replaced(tmp_path, runs, monkeypatch):
    monkeypatch.setattr("argosy.checkpoint.owner.WRITE_S", 0.1)
    place = tmp_path / "there"
    place.mkdir()
    (place / OWNER).touch()
    claim(LOCAL, str(place), runs[0])
    with pytest.raises(UserError, match="another run"):
        claim(LOCAL, str(place), runs[1])


@pytest.mark.parametrize("data", [b"[" * 100_000, b"{}", signed({"run": 3}), signed({"run": "a" * 100}), b"\xff"])
def test_an_owner_that_is_something_else_is_named(tmp_path, runs, data):
    place = tmp_path / "there"
    place.mkdir()
    (place / OWNER).write_bytes(data)
    with pytest.raises((DamagedCheckpoint, UserError), match=r"there/owner\.json"):
        claim(LOCAL, str(place), runs[0])
    assert (place / OWNER).read_bytes() == data
