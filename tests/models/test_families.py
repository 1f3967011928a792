"""Every family, in random configurations, is the same function here and in transformers, and comes through whole."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from argosy.models import hf
from argosy.models.decoder import Decoder, document_positions
from drawn_families import DRAWN, draw_config, random_model

SEQ_LEN = 40
TOLERANCE = 1e-5
"""Relative to the largest number."""


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    assert error <= TOLERANCE, f"{what}: {error:.1e}"


def saved(family: str, model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    if family == "kimi_k2":  # a class of its own only by its name
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": family}))


def loaded(folder: Path) -> Decoder:
    config, weights = hf.import_folder(folder)
    model = Decoder(config)
    model.to_empty(device="cpu")
    model.load_state_dict(dict(weights))
    return model


@pytest.mark.parametrize("family", DRAWN)
@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_drawn_model_is_the_same_function_and_comes_through_bit_for_bit(family: str, data: st.DataObject) -> None:
    config = draw_config(family, lambda options: data.draw(st.sampled_from(options)))
    theirs = random_model(config)
    with TemporaryDirectory() as name:
        folder, again = Path(name, "theirs"), Path(name, "ours")
        saved(family, theirs, folder)
        ours = loaded(folder)
        tokens = torch.randint(3, config.vocab_size, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
        assert_close(ours(tokens), theirs(tokens).logits, "logits")

        targets = torch.randint(config.vocab_size, tokens.shape, generator=torch.Generator().manual_seed(2))
        ours(tokens, targets).backward()
        loss = torch.nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()
        with torch.no_grad():
            for parameter in [*ours.parameters(), *theirs.parameters()]:
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        hf.export_folder(ours.config, ours.state_dict(), again, dtype=torch.float32)
        theirs.save_pretrained(folder.with_name("gradients"))
        largest = max(float(p.detach().abs().max()) for p in ours.parameters())
        expected = tensors(folder.with_name("gradients"))
        for name, gradient in tensors(again).items():
            if not name.endswith("e_score_correction_bias"):
                error = float((gradient - expected[name]).abs().max()) / largest
                assert error <= TOLERANCE, f"gradient of {name}: {error:.1e}"

        whole = loaded(folder)
        back = Path(name, "back")
        hf.export_folder(whole.config, whole.state_dict(), back, dtype=torch.float32)
        assert hf.import_config(back) == whole.config
        stored, returned = tensors(folder), tensors(back)
        assert stored.keys() == returned.keys()
        assert all(torch.equal(stored[name], returned[name]) for name in stored)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", DRAWN)
def test_packed_documents_and_a_cache_give_the_logits_of_documents_alone(family: str) -> None:
    import random

    config = draw_config(family, random.Random(family).choice)
    with TemporaryDirectory() as name:
        saved(family, random_model(config), Path(name))
        model = loaded(Path(name))
    tokens = torch.randint(3, config.vocab_size, (1, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    tokens[0, [0, 11, 30]] = 2
    with torch.no_grad():
        packed = model(tokens, positions_BT=document_positions(tokens, 2))
        alone = torch.cat([model(part) for part in tokens.split([11, 19, 10], 1)], 1)
        assert_close(packed, alone, "packed documents")
        cache, whole = model.new_cache(1, SEQ_LEN), model(tokens)
        stepwise = torch.cat([model(part, cache=cache) for part in tokens.split([13, 1, 1, 20, 5], 1)], 1)
        assert_close(stepwise, whole, "cache")
