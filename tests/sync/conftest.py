"""Sites in simulated time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from argosy.sync import assembly, average, exchange, links, site_recovery
from simulated_sites import Country


@pytest.fixture
def country(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Country]:
    """Make a country, whose clock is that of all its exchanges; each site sums several slices."""
    made: list[Country] = []
    monkeypatch.setattr(average, "SLICE_BYTES", 256)
    monkeypatch.setattr(average, "SLICES_OF_A_SITE", 3)

    def make(**keys: Any) -> Country:
        made.append(Country(tmp_path, **keys))
        clock = SimpleNamespace(monotonic=lambda: made[-1].now_s)
        for module in (assembly, average, exchange, links, site_recovery):
            monkeypatch.setattr(module, "time", clock)
        return made[-1]

    return make
