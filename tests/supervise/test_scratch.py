"""The folder that an agent keeps for its workers is its own, and is not left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from argosy.supervise import scratch
from argosy.supervise.scratch import MEMORY, scratch_folder


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scratch, "SCRATCH", tmp_path)


def test_it_is_named_after_its_process_and_is_gone_afterwards(tmp_path):
    with pytest.raises(LookupError), scratch_folder() as folder:
        assert folder.parent == tmp_path and folder.name.startswith(f"argosy-{os.getpid()}-")
        (folder / MEMORY / "checkpoint").write_bytes(b"x")
        raise LookupError
    assert not list(tmp_path.iterdir())


def test_folders_of_dead_agents_are_removed_and_those_of_others_are_not(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left, used, other = (tmp_path / name for name in (f"argosy-{dead.pid}-a", f"argosy-{os.getppid()}-b", "argosy-x-c"))
    for folder in (left, used, other):
        folder.mkdir()
    with scratch_folder():
        assert not left.exists() and used.exists() and other.exists()
