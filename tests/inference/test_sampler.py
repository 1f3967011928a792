"""Texts that are written on the way."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from argosy.checkpoint import store
from argosy.config.dump import save_run
from argosy.config.load import load
from argosy.errors import UserError
from argosy.inference.sampler import Sampler
from argosy.resilience.detect import node
from argosy.sinks.worker import about

PROMPT = "class "


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A run that writes samples every 10 steps; it has a checkpoint of its 40 steps."""
    shutil.copytree(trained, tmp_path / "run")
    run = load(tmp_path / "run/run.toml", {"evaluate.sample_prompt": PROMPT, "observe.sample_every_steps": 10})
    save_run(run, tmp_path / "run/run.toml")
    return tmp_path / "run"


def samples(folder: Path) -> list[dict[str, Any]]:
    path = folder / "samples.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write(sampler: Sampler, seconds: float = 30.0) -> None:
    sampler.tick()
    end = time.monotonic() + seconds
    while sampler.is_writing:
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)
        sampler.tick()


def verified(step: int) -> dict[str, Any]:
    return {"time_s": 1.0, "event": "verified", "step": step}


def test_a_verified_checkpoint_that_is_due_writes_a_text(folder):
    sampler = Sampler(about(folder, {}))
    sampler.events([verified(9)])  # too early
    write(sampler)
    assert samples(folder) == []
    assert [checkpoint.step for checkpoint in store.committed(folder)][-1] == 40
    sampler.events([verified(40)])
    write(sampler)
    (sample,) = samples(folder)
    assert (sample["step"], sample["prompt"]) == (39, PROMPT)
    assert len(sample["text"]) > 10
    sampler.events([verified(45)])  # not due before 50
    write(sampler)
    again = Sampler(about(folder, json.loads(json.dumps(sampler.state))))
    again.events([verified(49)])
    write(again)
    assert len(samples(folder)) == 1


def test_texts_of_steps_that_were_lost_are_forgotten_and_written_again(folder):
    sampler = Sampler(about(folder, {}))
    sampler.events([verified(40)])
    write(sampler)
    sampler.rewind(35)
    assert samples(folder) == []
    sampler.events([verified(40)])
    write(sampler)
    assert [sample["step"] for sample in samples(folder)] == [39]


def test_a_checkpoint_that_is_gone_is_passed_over(folder):
    sampler = Sampler(about(folder, {}))
    sampler.events([verified(30)])
    write(sampler)
    assert samples(folder) == []


def test_the_text_that_the_run_ends_with_is_the_last(folder):
    sampler = Sampler(about(folder, {}))
    sampler.close({"steps": 40, "sample": f"{PROMPT}A: pass"})
    assert [(sample["step"], sample["text"]) for sample in samples(folder)] == [(39, "A: pass")]


def test_a_model_that_would_take_the_memory_of_training_writes_nothing(folder, monkeypatch):
    little = node.MemoryReading(available_bytes=1000, limit_bytes=2000, oom_kills=0, machine_oom_kills=0)
    monkeypatch.setattr("argosy.inference.sampler.read_memory", lambda: little)
    sampler = Sampler(about(folder, {}))
    sampler.events([verified(40)])
    with pytest.raises(UserError, match="no more than half"):
        sampler.tick()


def test_samples_need_a_prompt():
    with pytest.raises(UserError, match=r"needs evaluate\.sample_prompt"):
        load(None, {"observe.sample_every_steps": 10, "evaluate.sample_prompt": ""})
