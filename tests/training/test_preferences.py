"""Preferences are learned as the papers' formulas say, answer by answer, however rows are laid out."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.compare.replay import replay
from argosy.config.dump import save_run
from argosy.data.packing import ID_MASK, MISMATCHED_BIT, REJECTED_BIT, START_BIT, TRAINED, Words
from argosy.data.shards import TokenSource
from argosy.errors import UserError
from argosy.inference.evaluate import evaluate
from argosy.inference.huggingface import export_checkpoint, import_adapter, import_checkpoint
from argosy.inference.loaded_model import generate
from argosy.inference.trained_model import open_checkpoint
from argosy.launch import run_folder
from argosy.models import hf
from argosy.models.decoder import Decoder
from argosy.models.microbatch import compared_microbatches
from argosy.parallel.world import World
from chats import SEQ_LEN, reference_of, rows_of, scores
from tiny import (
    EAGER,
    MODEL,
    decoder,
    eager,
    losses,
    made_step,
    plain_adamw,
    prepare_chats,
    run_config,
    train_in,
    train_step,
)
from workers import WorkerPool

STEPS, LR, BATCH = 5, 1e-2, 4
LR_OF = {"reward": 1e-3}
"""Scores of noise differ much from step to step, and rounding grows with them."""
EXPERTS = {"family": "mixtral", "moe": {"experts": 4, "expert_ffn_width": 16, "aux_coefficient": 0.0}}
OBJECTIVES = ["dpo", "ipo", "simpo", "orpo", "kto", "reward"]
PLANS = ["", "microbatch=2", "tp=2", "pp=2,microbatch=2", "cp=2", "dp_shard=2,zero=3"]
QUICK = {
    *(("dpo", plan) for plan in PLANS[1:]),
    ("ipo", "microbatch=2"), ("simpo", "microbatch=2"), ("orpo", "pp=2,microbatch=2"), ("reward", "microbatch=2"),
    ("kto", "cp=2"),
}  # fmt: skip
"""Objective and plan, in every run of the tests: the formula differs by objective, what plans divide does not."""


def sequence(random: np.random.Generator, prompt: Words, marks: int) -> Words:
    answer = random.integers(1, 400, int(random.integers(1, 6))).astype(np.int32) | TRAINED
    words = np.concatenate([prompt, answer]).astype(np.int32)
    words[0] |= START_BIT | marks
    return words


def units(is_judged: bool) -> list[Words]:
    """Pairs, or judged answers each with one to another prompt."""
    random, found = np.random.default_rng(0), []
    for number in range(120):
        prompt = random.integers(1, 400, int(random.integers(2, 8))).astype(np.int32)
        second = MISMATCHED_BIT if is_judged else REJECTED_BIT
        first = REJECTED_BIT if is_judged and number % 3 == 0 else 0
        found.append(np.concatenate([sequence(random, prompt, first), sequence(random, prompt, second)]))
    return found


ROWS = {kind: rows_of(units(kind))[: STEPS * BATCH] for kind in (False, True)}


def sections(objective: str, **model: Any) -> dict[str, dict[str, Any]]:
    return {
        "model": model_keys(objective, **model),
        "train": {"objective": objective, "global_batch": BATCH},
        "optimizer": {"eps": 1e-6},
        "data": {"seq_len": SEQ_LEN},
        "preference": {"undesirable_weight": 1.5, "centring": 0.05},
    }


def model_keys(objective: str, **keys: Any) -> dict[str, Any]:
    return {**keys, "score": True} if objective == "reward" else keys


def trained(world: World, plan: str, objective: str, model: dict[str, Any], known: np.ndarray) -> list[float]:
    """Loss and gradient norm of each step."""
    layout, said, is_judged = eager(plan), [], objective == "kto"
    step = train_step(world, layout, **sections(objective, **model))
    parallel = step.state.model
    of_all = ROWS[is_judged]
    for number in range(STEPS):
        part = slice(*layout.rows_of(parallel.dp_rank, BATCH).indices(BATCH)[:2])
        rows, values = of_all[number * BATCH :][part], known[number * BATCH :][part]
        batch = compared_microbatches(rows, layout.microbatch, world.device, is_judged, values)
        said += made_step(step, batch, LR_OF.get(objective, LR))
    return said


def published(objective: str, model: Decoder, rows: np.ndarray, known: np.ndarray) -> Tensor:
    """The loss of a batch, as the papers write it."""
    answers = [
        (kind, logp, count, float(before))
        for row, values in zip(rows, known, strict=True)
        for (kind, logp, count), before in zip(scores(model, row), values, strict=False)
    ]
    if objective == "kto":
        others = torch.stack([logp.detach() - before for kind, logp, _, before in answers if kind == 3])
        kl = others.mean().clamp(min=0)
        good = [1 - torch.sigmoid(0.1 * (logp - before - kl)) for kind, logp, _, before in answers if kind == 1]
        bad = [1.5 * (1 - torch.sigmoid(0.1 * (kl - logp + before))) for kind, logp, _, before in answers if kind == 2]
        return torch.stack(good + bad).mean()
    pairs = list(zip(answers[::2], answers[1::2], strict=True))
    terms = [_pair_loss(objective, *chosen[1:], *rejected[1:]) for chosen, rejected in pairs]
    loss = torch.stack(terms).mean()
    if objective == "orpo":
        loss = loss - sum(c[1] for c, _ in pairs) / sum(c[2] for c, _ in pairs)
    return loss


def _pair_loss(objective: str, w: Tensor, nw: int, ref_w: float, l: Tensor, nl: int, ref_l: float) -> Tensor:  # noqa: E741
    if objective == "reward":
        return -F.logsigmoid(w - l) + 0.05 * (w + l) ** 2
    if objective == "dpo":
        return -F.logsigmoid(0.1 * ((w - ref_w) - (l - ref_l)))
    if objective == "ipo":
        return ((w - ref_w) / nw - (l - ref_l) / nl - 1 / (2 * 0.1)) ** 2
    if objective == "simpo":
        return -F.logsigmoid(2.0 * (w / nw - l / nl) - 1.0)
    odds = [p / n - torch.log1p(-torch.exp(p / n)) for p, n in ((w, nw), (l, nl))]
    return -0.1 * F.logsigmoid(odds[0] - odds[1])


@cache
def known_of(is_judged: bool, has_score: bool, has_experts: bool = False) -> np.ndarray:
    """What the first weights say of the answers of all rows, which is the same for most objectives."""
    keys = (EXPERTS if has_experts else {}) | ({"score": True} if has_score else {})
    return reference_of(decoder(**keys), ROWS[is_judged])


@cache
def plain(objective: str, has_experts: bool = False) -> list[float]:
    keys = EXPERTS if has_experts else {}
    model, said, rows = decoder(**model_keys(objective, **keys)), [], ROWS[objective == "kto"]
    known = known_of(objective == "kto", objective == "reward", has_experts)
    adam = plain_adamw(model, LR_OF.get(objective, LR))
    for number in range(STEPS):
        part = slice(number * BATCH, (number + 1) * BATCH)
        loss = published(objective, model, rows[part], known[part])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        said += [loss.item(), norm.item()]
    return said


def check(ranks: Sequence[list[float]], said: list[float]) -> None:
    for theirs in ranks:
        assert theirs[::2] == pytest.approx(said[::2], rel=1e-5)
        assert theirs[1::2] == pytest.approx(said[1::2], rel=1e-3)


@pytest.mark.parametrize(
    ("objective", "plan"),
    [
        pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow)
        for row in itertools.product(OBJECTIVES, PLANS)
    ],
)
def test_steps_are_those_of_the_published_loss(workers: WorkerPool, objective: str, plan: str) -> None:
    said = plain(objective)
    known = known_of(objective == "kto", objective == "reward")
    check(workers.run(eager(plan).world_size, trained, plan, objective, {}, known), said)


@pytest.mark.slow
def test_experts_are_compared_on_all_ranks_as_on_one(workers: WorkerPool) -> None:
    known = known_of(is_judged=False, has_score=False, has_experts=True)
    check(workers.run(2, trained, "dp_shard=2,ep=2,zero=1", "dpo", EXPERTS, known), plain("dpo", has_experts=True))


@pytest.mark.parametrize("objective", ["dpo", pytest.param("kto", marks=pytest.mark.slow)])
def test_a_stopped_run_goes_on_bit_for_bit(workers: WorkerPool, tmp_path: Path, objective: str) -> None:
    folder = prepared(tmp_path, objective)
    run = run_config(
        folder,
        train={"objective": objective},
        data={"sources": {str(folder): 1.0}, "seq_len": 192},
        optimizer={"lr": 1e-3},
    )
    plan = eager("dp_shard=2,zero=1")
    whole, *_ = workers.run(2, train_in, run, plan, tmp_path / "whole")
    (tmp_path / "stopped").mkdir()
    [kept] = (tmp_path / "whole").glob("reference-*.npz")
    (tmp_path / "stopped" / kept.name).write_bytes(kept.read_bytes()[:-9])  # damaged, so the rows are scored anew
    workers.run(2, train_in, run, plan, tmp_path / "stopped", 3)
    again, *_ = workers.run(2, train_in, run, plan, tmp_path / "stopped")
    assert losses(again) == losses(whole)
    assert losses(whole)[0] == pytest.approx(np.log(2) if objective == "dpo" else 0.5, rel=1e-4)
    last = [record for record in whole if "loss" in record][-1]
    assert last["chosen_reward"] - last["rejected_reward"] > 0
    assert ("reward_accuracy" in last) == (objective == "dpo")


@pytest.mark.slow
def test_a_step_is_done_again_beside_the_answers_of_the_start(tmp_path: Path) -> None:
    folder = prepared(tmp_path, "dpo")
    data = {"sources": {str(folder): 1.0}, "seq_len": 192}
    launch, checkpoint = {"threads": 1, "device": "cpu"}, {"every_steps": 2, "keep_last": 9}
    run = run_config(folder, train={"objective": "dpo"}, data=data, launch=launch, checkpoint=checkpoint)
    (tmp_path / "run").mkdir()
    run_folder.write(tmp_path / "run", run, EAGER, [folder])
    train_in(World(), run, EAGER, tmp_path / "run")
    found = replay(tmp_path / "run", 3)
    assert found.start == 2 and found.is_equal, found


def test_a_reward_model_begins_with_a_base_and_goes_to_transformers(workers: WorkerPool, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification  # here, as ranks import this module

    folder, base = prepared(tmp_path, "dpo"), decoder()
    hf.export_folder(base.config, base.state_dict(), tmp_path / "hf", dtype=torch.float32)
    run = run_config(
        folder,
        model={**MODEL, "score": True, "weights": tmp_path / "hf"},
        train={"objective": "reward", "steps": 16},
        data={"sources": {str(folder): 1.0}, "seq_len": 192},
        optimizer={"lr": 1e-3},
    )
    whole, *_ = workers.run(2, train_in, run, eager("dp_shard=2,zero=1"), tmp_path / "whole")
    workers.run(2, train_in, run, eager("dp_shard=2,zero=1"), tmp_path / "stopped", 3)
    again, *_ = workers.run(2, train_in, run, eager("dp_shard=2,zero=1"), tmp_path / "stopped")
    assert losses(again) == losses(whole)
    cut, *_ = workers.run(2, train_in, run, eager("tp=2"), tmp_path / "cut", 4)
    assert losses(cut) == pytest.approx(losses(whole)[:4], rel=1e-4)
    scored = [(r["validation_loss"], r["validation_accuracy"]) for r in whole if "validation_loss" in r]
    assert scored[-1][0] < scored[0][0] and scored[-1][1] > 0.9

    save_run(run, tmp_path / "whole" / "run.toml")
    shutil.copyfile(folder / "tokenizer.json", tmp_path / "whole" / "tokenizer.json")
    found = evaluate(tmp_path / "whole", max_tokens=500)
    assert (found.loss, found.accuracy) == pytest.approx(scored[-1], rel=1e-5)
    export_checkpoint(tmp_path / "whole", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card and "nats per token" not in card
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32)
    row = TokenSource(folder, "train").tokens(0, 192)
    ours = open_checkpoint(tmp_path / "whole").model(torch.device("cpu"))
    with torch.no_grad():
        for begin, end in itertools.pairwise(np.flatnonzero(row & START_BIT)):
            ids = torch.from_numpy((row[begin:end] & ID_MASK).astype(np.int64))[None]
            assert float(theirs(ids).logits) == pytest.approx(float(ours(ids)[0, -1]), abs=1e-5)
    import_checkpoint(tmp_path / "out", tmp_path / "back")
    for name, tensor in open_checkpoint(tmp_path / "back").model().state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name])
    with pytest.raises(UserError, match="it gives scores, no text"):
        generate(tmp_path / "whole", "1+1?")
    with pytest.raises(UserError, match="a reward model, which has no adapters here"):
        import_adapter(tmp_path / "peft", tmp_path / "out", tmp_path / "again")


def prepared(tmp_path: Path, objective: str) -> Path:
    lines = []
    for n in range(200):
        good, bad = {"prompt": f"{n} + {n}?", "chosen": f"{2 * n}", "rejected": f"{2 * n + 1} or so"}, n % 2 == 0
        judged = {"prompt": good["prompt"], "completion": good["chosen" if bad else "rejected"], "label": bad}
        lines.append(json.dumps(good if objective == "dpo" else judged))
    return prepare_chats(tmp_path, lines, objective, 192)
