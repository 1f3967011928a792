"""Every family, in random configurations, is the same function here and in transformers, and comes through whole."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
