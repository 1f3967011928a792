"""`benchmarks/train_step.py`: who takes part, and where they look for packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import peers
import train_step


@pytest.mark.parametrize("source", ["", "@../other/src"])
def test_contenders_look_where_the_caller_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str) -> None:
    monkeypatch.setenv("PYTHONPATH", "/one:/two")
    monkeypatch.setattr(train_step.Contender, "_hear", lambda _: {})
    seen: dict[str, Any] = {}
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **options: seen.update(options))
    train_step.Contender(f"plain{source}", peers.Setting(), tmp_path)
    first, *others = seen["env"]["PYTHONPATH"].split(":")
    assert first.endswith("src") and others == ["/one", "/two"]
