"""`benchmarks/train_step.py`: who takes part, and where they look for packages."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import contenders
import gpu_day
import train_step


def test_peers_of_the_first_hour_are_contenders() -> None:
    assert set(gpu_day.PEERS) <= set(contenders.CONTENDERS)


def test_torchtitan_comes_only_where_it_is_named() -> None:
    assert not [name for name in train_step.Options().contenders if "torchtitan" in name]


def test_torchtitan_refuses_experts() -> None:
    turns: Any = None
    with pytest.raises(SystemExit, match="has no experts"):
        contenders.CONTENDERS["torchtitan"](contenders.Setting(experts=8), turns)


def test_torchtitan_trains_a_model_of_the_same_size() -> None:
    pytest.importorskip("torchtitan.models.llama3")

    class Turns:
        steps = 0

        def step_done(self) -> None:
            self.steps += 1
            if self.steps == 2:
                sys.exit("enough")

    turns: Any = Turns()
    small = contenders.Setting(layers=2, width=128, ffn_width=192, vocab_size=64, seq_len=16, batch=2)
    try:
        with pytest.raises(SystemExit, match="enough"):
            contenders.CONTENDERS["torchtitan-eager"](small, turns)
    finally:
        gc.enable()  # which torchtitan turns off


@pytest.mark.parametrize("source", ["", "@../other/src"])
def test_contenders_look_where_the_caller_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str) -> None:
    monkeypatch.setenv("PYTHONPATH", "/one:/two")
    monkeypatch.setattr(train_step.Contender, "_hear", lambda _: {})
    seen: dict[str, Any] = {}
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **options: seen.update(options))
    train_step.Contender(f"plain{source}", contenders.Setting(), tmp_path)
    first, *others = seen["env"]["PYTHONPATH"].split(":")
    assert first.endswith("src") and others == ["/one", "/two"]
