"""What a run says nothing of is as published practice has it, for its objective and adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from argosy.config.load import load
from argosy.config.practice import OF_OBJECTIVE
from argosy.config.schema import RunConfig
from argosy.errors import UserError

CHATS = {"data.prepare.input": ["chats.jsonl"]}


def run_of(**given: Any) -> RunConfig:
    return load(overrides=CHATS | {name.replace("__", "."): value for name, value in given.items()})


@pytest.mark.parametrize("objective", OF_OBJECTIVE)
def test_an_objective_brings_its_rate_length_and_warmup(objective: str) -> None:
    run, usual = run_of(train__objective=objective), OF_OBJECTIVE[objective]
    assert (run.optimizer.lr, run.train.epochs, run.schedule.warmup_fraction) == (usual.lr, usual.epochs, usual.warmup)
    assert (run.train.steps, run.train.minutes, run.optimizer.weight_decay, run.optimizer.beta2) == (0, 0, 0, 0.999)
    assert (run.name, run.schedule.kind, run.data.seq_len) == (objective, "cosine", 1024)
    if objective == "reward":
        assert run.model.score
        with pytest.raises(UserError, match=r"lora.rank = 8 with train.objective = \"reward\""):
            run_of(train__objective=objective, lora__rank=8)
        return
    beside = run_of(train__objective=objective, lora__rank=8)
    assert beside.optimizer.lr == pytest.approx(10 * usual.lr)


def test_nothing_of_the_demo_is_left_beside_conversations() -> None:
    run, plain = run_of(train__objective="sft"), RunConfig()
    assert run.data.prepare.max_text_bytes is None and run.evaluate == plain.evaluate
    assert (run.train.global_batch, run.launch.processes) == (16, 0)
    assert load(overrides={"train.objective": "pretrain"}) == load()


def test_what_the_user_says_stays(tmp_path: Path) -> None:
    run = run_of(train__objective="dpo", optimizer__lr=1e-4, train__steps=7, data__seq_len=256, name="mine")
    assert (run.optimizer.lr, run.train.steps, run.train.epochs, run.data.seq_len) == (1e-4, 7, 0, 256)
    assert (run.name, run.schedule.warmup_fraction) == ("mine", 0.1)
    timed = run_of(train__objective="sft", train__minutes=2.0)
    assert (timed.train.minutes, timed.train.epochs, timed.schedule.warmup_of(None)) == (2, 0, 20)
    assert run_of(train__objective="sft", schedule__warmup_steps=5).schedule.warmup_of(100) == 5
    (tmp_path / "run.toml").write_text('optimizer.lr = 3e-4\n[train]\nobjective = "sft"\nglobal_batch = 4\n')
    file = load(tmp_path / "run.toml")
    assert (file.optimizer.lr, file.train.global_batch, file.train.epochs) == (3e-4, 4, 3)
    assert file.schedule.warmup_of(200) == 6


def test_an_adapter_of_text_has_the_rate_of_its_paper() -> None:
    run = load(overrides={"lora.rank": 8, "model.preset": "llama-5m"})
    assert (run.optimizer.lr, run.optimizer.weight_decay, run.train.minutes) == (2e-4, 0, load().train.minutes)
    assert load(overrides={"lora.rank": 0}).optimizer.lr == load().optimizer.lr


def test_rows_are_no_longer_than_the_model_s_context() -> None:
    assert run_of(train__objective="sft", model__max_seq_len=512).data.seq_len == 512


def test_a_share_of_an_unknown_length_is_refused() -> None:
    with pytest.raises(UserError, match=r"schedule.warmup_fraction = 0.1 with train.minutes"):
        load(overrides={"schedule.warmup_fraction": 0.1})
