"""Sites in simulated time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

from argosy.sync import assembly, average, exchange, links, site_recovery
from simulated_sites import Country


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory: in simulated time sites write thousands of files, which take most of the test on a disk."""
    memory = "/dev/shm"
    with TemporaryDirectory(prefix="argosy-sites-", dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


@pytest.fixture
def country(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Country]:
    """Make a country, whose clock is that of all its exchanges; each site sums several slices."""
    made: list[Country] = []
    monkeypatch.setattr(average, "SLICE_BYTES", 256)
    monkeypatch.setattr(average, "SLICES_OF_A_SITE", 3)

    def make(**keys: Any) -> Country:
        made.append(Country(folder, **keys))
        clock = SimpleNamespace(monotonic=lambda: made[-1].now_s)
        for module in (assembly, average, exchange, links, site_recovery):
            monkeypatch.setattr(module, "time", clock)
        return made[-1]

    return make
