"""Every family, in random configurations, is the same function here and in transformers, and comes through whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argosy.config.load import load
from argosy.models.hf_config import config_from_json, config_to_json
from argosy.plan.workload import parameters
from drawn_families import DRAWN
from family_cards import card_of

TOLERANCE = 1e-5
SHORT = ("mistral", "gemma3_text", "olmo3", "cohere2", "phi3", "gpt_oss", "granitemoe", "deepseek_v2")
"""They have each feature, and each kind of fused weights, at least once."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.slow) for name in DRAWN]
)
@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_drawn_model_is_the_same_function_and_comes_through_bit_for_bit(family: str, data: st.DataObject) -> None:
    card = card_of(family, lambda options: data.draw(st.sampled_from(options)))
    assert {name for name in ("config", "weights", "parameters") if card[name] != 1} == set()
    errors = {name: card[name] for name in ("logits", "gradients", "packed", "cache")}
    assert max(errors.values()) <= TOLERANCE, errors


PUBLISHED_BILLIONS = {
    "gemma2-2b": 2.614, "gemma2-27b": 27.227, "gemma3-27b": 27.009, "mistral-7b": 7.242, "gpt-oss-20b": 20.915,
    "gpt-oss-120b": 116.829, "olmo2-7b": 7.299, "smollm3-3b": 3.075, "phi4": 14.660, "glm4-9b": 9.400,
    "granite3-8b": 8.171, "qwen2-57b-a14b": 57.409, "deepseek-v2-lite": 15.706, "deepseek-v2": 235.741,
    "kimi-k2": 1026.408, "command-r7b": 8.028, "seed-oss-36b": 36.151, "olmoe-7b-a1b": 6.919,
}  # fmt: skip


@pytest.mark.parametrize("preset", PUBLISHED_BILLIONS)
def test_a_preset_has_the_published_number_of_parameters_and_its_class_can_say_it(preset: str) -> None:
    model = load(None, {"model.preset": preset}).model
    assert parameters(model) / 1e9 == pytest.approx(PUBLISHED_BILLIONS[preset], abs=1e-3)
    written = config_to_json(model, dtype=torch.bfloat16, eod_id=None)
    assert config_from_json(written, Path("config.json")).attention == model.attention
