"""Every family, in random configurations, is the same function here and in transformers, and comes through whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argosy.config.load import load
from argosy.models import hf
from argosy.models.decoder import Decoder
from argosy.models.hf_config import config_from_json, config_to_json
from argosy.models.initialize import materialize
from drawn_families import DRAWN, draw_config
from families_in_worlds import PLANS
from family_cards import card_of, card_under_plans, plannable
from transformers_models import load_theirs
from workers import WorkerPool

TOLERANCE = 1e-5
SHORT = (
    "mistral", "gemma3_text", "olmo3", "cohere2", "phi3", "gpt_oss", "granitemoe", "deepseek_v2", "qwen3_next",
    "mimo_v2_flash", "laguna", "gemma4_text", "llama4_text",
)  # fmt: skip
"""They have each feature, and each kind of fused weights, at least once."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.slow) for name in DRAWN]
)
@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_drawn_model_is_the_same_function_and_comes_through_bit_for_bit(
    family: str, data: st.DataObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    card = card_of(family, lambda options: data.draw(st.sampled_from(options)))
    assert {name for name in ("config", "weights", "index", "parameters", "flops") if card[name] != 1} == set()
    assert not any(tmp_path.iterdir())  # it keeps nothing, and nothing where it was called
    errors = {name: card[name] for name in ("logits", "gradients", "packed", "cache")}
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in ("phi3", "deepseek_v3") else pytest.mark.slow) for name in DRAWN],
)
def test_under_every_plan_it_learns_as_in_a_plain_loop_of_transformers(family: str, workers: WorkerPool) -> None:
    cards = card_under_plans(family, plannable(family, 0), workers, steps=3)
    assert cards.keys() >= {"one process", *PLANS} - {"ep"}
    assert max(max(card.values()) for card in cards.values()) <= TOLERANCE, cards


@pytest.mark.parametrize(
    "family", ["cwm", "gemma3_text", "smollm3", "glm4", "phi3", "mimo_v2_flash", "laguna", "gemma4_text"]
)
def test_what_was_trained_here_alone_is_read_by_transformers(family: str, tmp_path: Path) -> None:
    """Its class has special tokens beyond a small vocabulary, or windows, that no config.json of authors replaces."""
    draw_config(family, lambda options: options[-1]).save_pretrained(tmp_path / "theirs")
    config = hf.import_config(tmp_path / "theirs")
    ours = Decoder(config)
    materialize(ours, config, torch.device("cpu"), 0)
    hf.export_folder(config, ours.state_dict(), tmp_path / "out", dtype=torch.float32, eod_id=0)
    tokens = torch.randint(config.vocab_size, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(load_theirs(tmp_path / "out")(tokens).logits, ours(tokens), atol=1e-5, rtol=1e-5)


PRESETS = (
    "gemma2-27b", "gemma3-27b", "mistral-7b", "gpt-oss-120b", "olmo2-7b", "smollm3-3b", "phi4", "glm4-9b",
    "granite3-8b", "qwen2-57b-a14b", "deepseek-v2", "kimi-k2", "command-r7b", "seed-oss-36b", "olmoe-7b-a1b",
    "qwen3-next-80b-a3b", "qwen3.5-9b", "qwen3.5-35b-a3b", "mimo-v2-flash", "gemma4-31b", "llama4-scout",
    "llama4-maverick",
)  # fmt: skip


@pytest.mark.parametrize("preset", PRESETS)
def test_the_class_of_a_preset_can_say_it(preset: str) -> None:
    model = load(None, {"model.preset": preset}).model
    written = config_to_json(model, dtype=torch.bfloat16, eod_id=None)
    assert config_from_json(written, Path("config.json")).attention == model.attention
