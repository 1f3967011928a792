"""Layers go to pipeline ranks by speed, as many as make the slowest end first, and the head counts as work."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.config.model import ModelConfig
from argosy.plan.dealing import PipelineWork, RankWork, pipeline_s
from argosy.plan.plan import Plan

MODEL = ModelConfig(layers=8, width=64, heads=4, head_width=16, ffn_width=192, vocab_size=64)
HEAD = 64 * 64 / (4 * 64 * 64 + 3 * 64 * 192 + 2 * 64 * 16 / 2)
"""Multiplications of the head over those of a layer, with sequences of 16 tokens."""


def work_of(plan: str, **keys: int) -> PipelineWork:
    return PipelineWork.of(Plan.parse(plan), MODEL.model_copy(update=keys), 16)


def test_what_a_rank_has_is_its_layers_and_the_head():
    work = work_of("pp=4,layers=3:2:2:1")
    assert work.layers.tolist() == [3, 2, 2, 1]
    assert work.beside.tolist() == [0, 0, 0, pytest.approx(HEAD, rel=0.1)]
    assert (work.doubtful > 0).tolist() == [True, False, False, True]
    v_shaped = work_of("pp=2,schedule=zbv,layers=3:2:2:1")
    assert v_shaped.layers.tolist() == [4, 4] and (v_shaped.beside > 0).tolist() == [True, False]
    assert work_of("pp=2,schedule=interleaved_1f1b").layers.sum() == 8


def test_layers_that_nobody_said_are_those_of_the_split_by_cost():
    work = work_of("pp=2", vocab_size=64 * 40)
    assert work.layers[0] > work.layers[1] and work.plan.layers == ":".join(f"{n:.0f}" for n in work.layers)


@pytest.mark.parametrize(
    ("plan", "stage_s", "layers"),
    [
        ("pp=2,layers=4:4", (1.0, 3.0), "6:2"),
        ("pp=2,layers=4:4", (1.0, 1.05), None),
        ("pp=2,layers=6:2", (3.0, 1.0), "4:4"),
        ("pp=4,layers=2:2:2:2", (1.0, 1.0, 9.0, 1.0), "2:3:1:2"),
        ("pp=2,schedule=interleaved_1f1b,layers=2:2:2:2", (1.0, 3.0), "3:1:3:1"),
        ("pp=2,schedule=interleaved_1f1b,layers=2:2:2:2", (1.0, 30.0), None),  # a stage would have no layer
    ],
)
def test_layers_follow_the_speed(plan, stage_s, layers):
    work = work_of(plan)
    dealt = work.dealt_by_speed(np.array(stage_s) * work.units / work.layers)
    assert (dealt and dealt.plan.layers) == layers
    if dealt is not None:
        now_s, new_s = (of.takes_s(np.array(stage_s), work, 8) for of in (work, dealt))
        assert new_s < now_s


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.2, 5.0), min_size=4, max_size=4))
def test_no_other_deal_of_layers_has_a_faster_slowest_rank(speeds):
    work = work_of("pp=4,layers=2:2:2:2")
    dealt = work.dealt_by_speed(np.array(speeds) * work.units)
    slowest = np.max(np.array(speeds) * (dealt or work).units)
    for a in range(1, 6):
        for b in range(1, 7 - a):
            for c in range(1, 8 - a - b):
                other = np.array([a, b, c, 8 - a - b - c]) + work.beside
                assert slowest <= np.max(np.array(speeds) * other) * (1 + 1e-9)


def test_a_stage_has_no_more_layers_than_room():
    work = work_of("pp=2,layers=4:4")
    dealt = work.dealt_by_speed(np.array([1.0, 9.0]), np.array([5.0, 8.0]))
    assert dealt is not None and dealt.plan.layers == "5:3"
    assert work.dealt_by_speed(np.array([1.0, 9.0]), np.array([3.0, 3.0])) is None


def test_a_pipeline_takes_as_long_as_its_slowest_rank_and_once_through_the_others():
    assert pipeline_s(np.array([1.0, 2.0, 1.0]), 1, 10) == 22.0
    assert pipeline_s(np.array([1.0, 2.0, 1.0]), 2, 10) == 21.0


def test_ranks_of_a_stage_do_the_same_and_stages_of_one_rank_do_their_layers():
    replicas = RankWork.of(Plan.parse("pp=2,dp_replicate=2"), MODEL, 16)
    assert replicas.peers == (range(0, 2), range(2, 4)) and (replicas.most == replicas.least).all()
    stages = RankWork.of(Plan.parse("pp=2,layers=5:3"), MODEL, 16)
    assert stages.peers == (range(0, 2),) and stages.least.tolist() == [5, 3]
    assert (stages.most > stages.least).all()
