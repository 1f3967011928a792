"""Every plan says what one process says: logits, greedy and drawn tokens, held-out loss, with rows of unlike length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from argosy.checkpoint.adapter import MergedWeights, adapter_shapes
from argosy.config.schema import RunConfig
from argosy.config.train import LoraConfig
from argosy.errors import UserError
from argosy.inference.rank_model import RankModel, SampleRequest, score
from argosy.models.decoder import Decoder
from argosy.models.initialize import materialize
from argosy.models.lazy_weights import HeldWeights, LazyWeights
from argosy.parallel.pieces import pieces_of
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.evaluation import HeldOut
from parallel.test_parity import DENSE, FAMILIES
from workers import WorkerPool

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3], [300, 2, 40], [1, 2, 3, 4], [9, 9]]
LIMITS = [6, 9, 4, 8, 7]
SEQ_LEN = 24


ADAPTERS = {"dora": ("llama", "all-linear"), "dora_experts": ("mixtral", "experts.*")}


@dataclass(frozen=True)
class DrawnModel:
    """A model with random weights, and a random adapter if its run has one."""

    run: RunConfig

    @contextmanager
    def weights(self) -> Iterator[LazyWeights]:
        model = Decoder(self.run.model)
        materialize(model, self.run.model, torch.device("cpu"), seed=3)
        weights = HeldWeights(model.state_dict())
        if not self.run.lora.rank:
            yield weights
            return
        generator = torch.Generator().manual_seed(5)
        shapes = adapter_shapes(self.run)
        adapter = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
        yield MergedWeights(weights, HeldWeights(adapter), self.run.lora, torch.float32)


def source(family: str) -> Any:
    if family in ADAPTERS:
        base, target = ADAPTERS[family]
        lora = LoraConfig(rank=4, kind="dora", targets=(target,))
        return DrawnModel(source(base).run.model_copy(update={"lora": lora}))
    model = {**DENSE, "max_seq_len": 64, "init_std": 0.2, **FAMILIES[family]}
    return DrawnModel(RunConfig.model_validate({"model": model, "data": {"seq_len": SEQ_LEN}}))


def use(world: World, family: str, plan: str) -> tuple[dict[int, Any], list[Any], list[Any], float]:
    """Logits by row, tokens (likeliest, drawn), and loss."""
    model = RankModel(source(family), Plan.parse(plan), world)
    tokens = torch.randint(0, 403, (3, 11), generator=torch.Generator().manual_seed(1))
    found = model.logits(tokens)
    logits = {} if found is None else dict(enumerate(found.numpy(), model.rows_of(model.dp_rank, 3).start))
    written = []
    for temperature in (0.0, 1.0):
        asked = SampleRequest(PROMPTS, LIMITS, [11, 12, 13, 14, 15], temperature, 0.9, [402])
        written.append(list(model.sample(asked, lambda: False)))
    windows = np.random.default_rng(0).integers(0, 400, (7, SEQ_LEN + 1), dtype=np.int32)
    loss = score(source(family), Plan.parse(plan), world, HeldOut(windows, 100.0, 0)).loss
    return logits, *written, loss


@cache
def alone(family: str) -> tuple[dict[int, Any], list[Any], list[Any], float]:
    return use(World(), family, "")


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        pytest.param("llama", "tp=2", marks=pytest.mark.slow),
        ("qwen3", "pp=2,precision=fp32"),
        ("mtp_tied", "pp=2,tp=2"),
        pytest.param("qwen2", "dp_shard=2,tp=2", marks=pytest.mark.slow),
        pytest.param("llama", "cp=2,zero=0", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "tp=2", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "dp_shard=2,ep=2,tp=2", marks=pytest.mark.slow),
        ("gpt_oss", "cp=2,ep=2"),
        ("dora", "tp=2"),
        pytest.param("dora_experts", "tp=2,dp_shard=2,ep=2", marks=pytest.mark.slow),
        pytest.param("llama", "tp=4", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "pp=2,dp_shard=2,ep=2", marks=pytest.mark.slow),
        pytest.param("mtp", "pp=2,dp_replicate=2", marks=pytest.mark.slow),
        pytest.param("gemma2", "tp=2", marks=pytest.mark.slow),
        pytest.param("olmo3", "tp=4", marks=pytest.mark.slow),
        pytest.param("cohere2", "dp_shard=4", marks=pytest.mark.slow),
        pytest.param("nemotron", "cp=2,tp=2", marks=pytest.mark.slow),
        pytest.param("mup_experts", "tp=2,pp=2", marks=pytest.mark.slow),
        pytest.param("qwen2_moe", "dp_shard=4,ep=2", marks=pytest.mark.slow),
    ],
)
def test_every_plan_says_what_one_process_says(workers: WorkerPool, family: str, plan: str):
    expected, likeliest, drawn, loss = alone(family)
    by_rank = workers.run(Plan.parse(plan).world_size, use, family, plan)
    logits = {row: values for found, *_ in by_rank for row, values in found.items()}
    assert logits.keys() == expected.keys() == {0, 1, 2}
    for row, values in expected.items():
        torch.testing.assert_close(
            torch.tensor(logits[row]), torch.tensor(values), rtol=0, atol=2e-5 * float(abs(values).max())
        )
    for _, their_likeliest, their_drawn, their_loss in by_rank:
        assert their_likeliest == likeliest and their_drawn == drawn
        assert their_loss == pytest.approx(loss, rel=1e-6)


def test_weights_in_bf16_take_half():
    model = RankModel(source("llama"), Plan.parse("precision=bf16,weights=bf16"), World())
    assert {parameter.dtype for parameter in model.model.parameters()} == {torch.bfloat16}
    tokens = torch.arange(24)[None]
    found, exact = model.logits(tokens), RankModel(source("llama"), Plan(), World()).logits(tokens)
    assert found is not None and exact is not None and found.dtype == torch.float32
    torch.testing.assert_close(found, exact, rtol=0, atol=0.05 * float(exact.abs().max()))


def numbers_held(world: World, plan: str) -> int:
    model = RankModel(source("llama"), Plan.parse(plan), world)
    return sum(piece.value.numel() for piece in pieces_of(model.model, model.meshes))


@pytest.mark.parametrize("family", ["gemma2", "qwen3_next", "deepseek_v3", "gpt_oss"])
def test_rows_of_a_batch_are_written_as_if_alone_and_as_without_a_cache(family: str):
    model = RankModel(source(family), Plan(), World())

    def written(rows: list[int], temperature: float) -> list[list[int]]:
        prompts, limits = [PROMPTS[row] for row in rows], [LIMITS[row] for row in rows]
        asked = SampleRequest(prompts, limits, rows, temperature, 0.9, [402])
        steps = list(model.sample(asked, lambda: False))
        return [[token for step in steps if (token := step[i]) is not None] for i in range(len(rows))]

    for temperature in (0.0, 1.0):
        together = written([0, 1, 2, 3, 4], temperature)
        assert together == [written([row], temperature)[0] for row in range(5)]
    for prompt, tokens in zip(PROMPTS, written([0, 1, 2, 3, 4], 0.0), strict=True):
        logits = model.logits(torch.tensor([prompt + tokens]))
        assert logits is not None and logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


def test_an_adapter_changes_what_is_said():
    assert alone("dora")[1] != alone("llama")[1] and alone("dora_experts")[-1] != alone("mixtral")[-1]


def test_a_rank_holds_its_part_alone(workers: WorkerPool):
    whole = numbers_held(World(), "")
    for plan in ("tp=2", "dp_shard=2", "pp=2,layers=2:2", "cp=2"):
        held = workers.run(2, numbers_held, plan)
        assert max(held) < 0.52 * whole, plan


@pytest.mark.parametrize(
    ("family", "plan", "message"),
    [
        ("llama", "tp=3", r'plan = "tp=3.*": plan\.tp = 3 does not divide model\.heads = 4'),
        ("llama", "pp=8", r"stages, and model\.layers = 4: each stage needs a layer"),
        ("llama", "ep=2,dp_shard=2", r"ep"),
        ("qwen3_next", "tp=8", "tp"),
        ("llama", "precision=fp8", r"precision = fp8 is for training\. Use precision=bf16"),
    ],
)
def test_a_plan_that_cannot_lay_the_model_out_is_refused(family: str, plan: str, message: str):
    with pytest.raises(UserError, match=message):
        RankModel(source(family), Plan.parse(plan), World())
