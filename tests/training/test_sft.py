"""The answers of conversations are learned as if each conversation were alone, however rows are laid out."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from argosy.data.packing import ID_MASK, TRAINED
from argosy.data.shards import TokenSource
from argosy.models.decoder import Decoder
from argosy.models.microbatch import microbatches
from argosy.parallel.world import World
from argosy.training.evaluation import HeldOut
from chats import SEQ_LEN, conversations, rows_of
from tiny import decoder, eager, losses, made_step, plain_adamw, prepare_chats, run_config, train_in, train_step
from workers import WorkerPool

STEPS, LR, BATCH = 5, 1e-2, 8
UNITS = conversations(180)
ROWS = rows_of(UNITS)[: STEPS * BATCH]
EXPERTS = {"family": "mixtral", "moe": {"experts": 4, "expert_ffn_width": 16, "aux_coefficient": 0.0}}
PLANS = ["microbatch=2", "tp=2", "pp=2", "cp=2", "dp_shard=2,zero=3"]
SLOW = [
    "cp=2,context=ulysses",
    "dp_shard=2,zero=1",
    "dp_replicate=2,shares=3:1",
    "pp=2,dp_shard=2,zero=3",
    "tp=2,cp=2",
    "pp=2,schedule=interleaved_1f1b",
]


def sections(**model: Any) -> dict[str, dict[str, Any]]:
    return {
        "model": model,
        "train": {"objective": "sft", "global_batch": BATCH},
        "optimizer": {"eps": 1e-6},
        "data": {"seq_len": SEQ_LEN},
    }


def trained(world: World, plan: str, **model: Any) -> list[float]:
    """Loss and gradient norm of each step."""
    layout, said = eager(plan), []
    step = train_step(world, layout, **sections(**model))
    for number in range(len(ROWS) // BATCH):
        rows = ROWS[number * BATCH :][layout.rows_of(step.state.model.dp_rank, BATCH)]
        said += made_step(step, microbatches(rows, layout.microbatch, 0, world.device), LR)
    return said


def alone(rows: np.ndarray) -> list[torch.Tensor]:
    """The conversations of rows, each cut out of its row."""
    found = []
    for row in rows[:, :-1]:
        starts = [*np.flatnonzero(row >> 26 & 1), len(row)]
        found += [torch.from_numpy(row[a:b].astype(np.int64)) for a, b in itertools.pairwise(starts)]
    return [words for words in found if (words & TRAINED).any()]


def plain_step(model: Decoder, rows: np.ndarray) -> torch.Tensor:
    """The mean over answers' tokens of conversations that go through the model one by one."""
    losses, count = [], 0
    for words in alone(rows):
        ids, learned = words & ID_MASK, words[1:] & TRAINED != 0
        logits = model(ids[None])[0, :-1]
        losses.append(F.cross_entropy(logits[learned], ids[1:][learned], reduction="sum"))
        count += int(learned.sum())
    return torch.stack(losses).sum() / count


def plain(**model_keys: Any) -> list[float]:
    model, said = decoder(**model_keys), []
    adam = plain_adamw(model, LR)
    for number in range(len(ROWS) // BATCH):
        loss = plain_step(model, ROWS[number * BATCH : (number + 1) * BATCH])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        said += [loss.item(), norm.item()]
    return said


@pytest.fixture(scope="module")
def reference() -> list[float]:
    return plain()


@pytest.mark.parametrize("plan", ["", *PLANS, *(pytest.param(plan, marks=pytest.mark.slow) for plan in SLOW)])
def test_losses_are_those_of_conversations_one_by_one(workers: WorkerPool, reference: list[float], plan: str) -> None:
    model = {"layers": 4} if "interleaved" in plan else {}  # two stages a rank
    expected = plain(**model) if model else reference
    for said in workers.run(eager(plan).world_size, partial(trained, **model), plan):
        assert said[::2] == pytest.approx(expected[::2], rel=1e-5)
        assert said[1::2] == pytest.approx(expected[1::2], rel=2e-4)


def test_experts_learn_on_all_ranks_as_on_one(workers: WorkerPool) -> None:
    said = plain(**EXPERTS)
    for theirs in workers.run(2, partial(trained, **EXPERTS), "dp_shard=2,ep=2,zero=1"):
        assert theirs[::2] == pytest.approx(said[::2], rel=1e-5)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared conversations, most in the train split."""
    folder = tmp_path_factory.mktemp("chats")
    lines = [
        json.dumps({"prompt": f"What is {n} + {n}?", "completion": f"It is {2 * n}, as {n} is half of it."})
        for n in range(300)
    ]
    return prepare_chats(folder, lines, "sft", 128)


def test_a_stopped_run_goes_on_bit_for_bit_and_scores_answers(workers: WorkerPool, chats: Path, tmp_path: Path) -> None:
    run = run_config(chats, train={"objective": "sft"}, data={"sources": {str(chats): 1.0}, "seq_len": 128})
    plan = eager("dp_shard=2,zero=1")
    whole, *_ = workers.run(2, train_in, run, plan, tmp_path / "whole")
    workers.run(2, train_in, run, plan, tmp_path / "stopped", 3)
    again, *_ = workers.run(2, train_in, run, plan, tmp_path / "stopped")
    assert losses(again) == losses(whole)
    assert losses(whole)[-1] < losses(whole)[0]
    alone = train_in(World(), run, eager(""), tmp_path / "alone")
    assert losses(alone) == pytest.approx(losses(whole), rel=1e-4)
    scored = HeldOut.read([TokenSource(chats, "validation")], 128, 1000)
    assert 0 < scored.tokens < scored.windows[:, :-1].size
    found, theirs = ([r["validation_loss"] for r in records if "validation_loss" in r] for records in (alone, whole))
    assert found == pytest.approx(theirs, rel=1e-4)
    assert found[-1] < found[0]


def test_text_may_be_mixed_in() -> None:
    text = np.random.default_rng(0).integers(1, 400, (1, SEQ_LEN + 1)).astype(np.int32)
    (both,) = microbatches(np.concatenate([ROWS[:1], text]), 2, 0, torch.device("cpu"))
    (chat,) = microbatches(ROWS[:1], 1, 0, torch.device("cpu"))
    assert both.counted == chat.counted + SEQ_LEN
    assert torch.equal(both.targets_BT[0], chat.targets_BT[0])
    assert torch.equal(both.targets_BT[1], torch.from_numpy(text[0, 1:].astype(np.int64)))
