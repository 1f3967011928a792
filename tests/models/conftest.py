"""Small decoders that every test of this folder may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from argosy.config.model import ModelConfig
from argosy.models.decoder import Decoder
from argosy.models.initialize import materialize

SMALL = ModelConfig(
    layers=2,
    width=48,
    heads=4,
    kv_heads=2,
    head_width=12,
    ffn_width=80,
    vocab_size=101,
    max_seq_len=128,
    init_std=0.2,
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small() -> ModelConfig:
    """A llama with grouped queries, tiny, with weights large enough that a mistake shows."""
    return SMALL


@pytest.fixture
def build():  # type: ignore[no-untyped-def]
    """Config -> decoder on the CPU, norms and biases random too, so that leaving one out shows."""

    def build(config: ModelConfig, seed: int = 0, compute_dtype: torch.dtype = torch.float32) -> Decoder:
        model = Decoder(config, compute_dtype)
        materialize(model, config, torch.device("cpu"), seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.empty_like(parameter).normal_(std=0.3, generator=generator))
        return model

    return build
