from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from argosy.plan.design.space import DesignSpace

DEVICE = {"base": '"h100"'}
TRAIN = """
[train]
model = "llama3-8b"
devices = 64
global_batch = 256
seq_len = 8192
tokens = 1e12
"""
SERVE = """
[serve]
model = "llama3-8b"
tp = [1, 2]
sequences = [1, 16]
"""

Load = Callable[..., DesignSpace]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load a space of some figures of a device; `work` is the rest of the file."""

    def loaded(work: str = TRAIN + SERVE, **figures: str) -> DesignSpace:
        path = tmp_path / "space.toml"
        lines = [f"{key} = {value}" for key, value in (DEVICE | figures).items()]
        path.write_text("\n".join(["[device]", *lines, work]))
        return DesignSpace.load(path)

    return loaded
