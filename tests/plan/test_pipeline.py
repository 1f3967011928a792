"""Layers are dealt to stages whole, in order, and so that the slowest stage is as fast as can be."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)

from argosy.config.model import ModelConfig
from argosy.plan.pipeline import SCHEDULES, split_layers
from argosy.plan.workload import train_flops_per_token

SEQ_LEN = 256
SMALL_HEAD = {"width": 512, "heads": 8, "kv_heads": 8, "ffn_width": 2048, "vocab_size": 256}
LARGE_HEAD = {"width": 64, "heads": 2, "kv_heads": 2, "head_width": 32, "ffn_width": 128, "vocab_size": 4096}
MODELS: dict[str, dict[str, Any]] = {"small head": SMALL_HEAD, "large head": LARGE_HEAD}


def model(layers: int, **sizes: Any) -> ModelConfig:
    return ModelConfig.model_validate({"layers": layers, **sizes})


def cost(config: ModelConfig, layers: range) -> float:
    """FLOPs of a stage, the head counted with the last layer."""
    upto = [
        train_flops_per_token(config.model_copy(update={"layers": n}), SEQ_LEN) for n in (layers.start, layers.stop)
    ]
    head = 6 * config.width * config.vocab_size
    return upto[1] - upto[0] + (head if layers.stop == config.layers else 0)


def every_split(layers: int, stages: int) -> list[list[range]]:
    return [
        [range(a, b) for a, b in itertools.pairwise((0, *cuts, layers))]
        for cuts in itertools.combinations(range(1, layers), stages - 1)
    ]


@pytest.mark.parametrize("sizes", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("layers", [1, 2, 5, 8, 9])
def test_no_other_split_has_a_faster_slowest_stage(layers, sizes):
    config = model(layers, **sizes)
    for stages in range(1, layers + 1):
        found = split_layers(config, SEQ_LEN, stages)
        best = min(max(cost(config, part) for part in split) for split in every_split(layers, stages))
        assert max(cost(config, part) for part in found) == pytest.approx(best), (stages, found)


@pytest.mark.parametrize("sizes", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("layers", [7, 32, 61])
def test_stages_hold_all_layers_in_order_and_each_at_least_one(layers, sizes):
    config = model(layers, **sizes)
    for stages in (1, 2, 3, 4, 7):
        split = split_layers(config, SEQ_LEN, stages)
        assert len(split) == stages and all(len(part) >= 1 for part in split)
        assert list(itertools.chain(*split)) == list(range(layers))


def test_the_head_counts_as_the_layers_that_it_costs():
    assert [len(part) for part in split_layers(model(8, **SMALL_HEAD), SEQ_LEN, 4)] == [2, 2, 2, 2]
    config = model(8, **LARGE_HEAD)
    per_layer, head = cost(config, range(1)), 6 * config.width * config.vocab_size
    assert 4 * per_layer < head < 6 * per_layer
    assert [len(part) for part in split_layers(config, SEQ_LEN, 2)] == [6, 2]


def test_of_equally_fast_splits_the_most_even_is_taken():
    """Ten layers in four stages: some stage has three, and none need have one."""
    assert sorted(len(part) for part in split_layers(model(10, **SMALL_HEAD), SEQ_LEN, 4)) == [2, 2, 3, 3]


@pytest.mark.parametrize(("name", "rule"), SCHEDULES.items())
def test_what_a_schedule_is_said_to_ask_for_is_what_torch_asks_for(name, rule):
    kind = get_schedule_class(rule.torch_name)
    assert issubclass(kind, PipelineScheduleSingle if rule.stages_per_rank == 1 else PipelineScheduleMulti)
    assert rule.v_shaped == (kind in (ScheduleZBVZeroBubble, ScheduleDualPipeV))
