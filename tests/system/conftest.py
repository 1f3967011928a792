"""A folder to run commands in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from commands import Folder


@pytest.fixture
def folder(tmp_path: Path, corpus: Path) -> Folder:
    """An empty folder to work in."""
    return Folder(tmp_path, corpus)


@pytest.fixture
def refused(folder: Folder) -> Callable[..., str]:
    """Run a command that must be refused: exit code 2, a message with all of `said`, no traceback."""

    def run(*words: object, said: tuple[str, ...]) -> str:
        text = folder.argosy(*words, code=2)
        for part in said:
            assert part in text, text
        assert "Traceback" not in text
        return text

    return run
