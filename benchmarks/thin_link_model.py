"""The model of `thin_link.py`, and a batch of it: as many rows as the environment's THIN_LINK_ROWS says."""

from __future__ import annotations

import os
from typing import Any

import torch

from argosy.config.schema import RunConfig
from argosy.models.microbatch import Microbatch, microbatches

MODEL: dict[str, Any] = {
    "layers": 6, "width": 320, "heads": 8, "kv_heads": 8, "head_width": 40, "ffn_width": 896, "vocab_size": 4096,
}  # fmt: skip
ROWS, TOKENS = int(os.environ.get("THIN_LINK_ROWS", "2")), 64


def configuration(sites: int) -> RunConfig:
    """Return the run of so many sites."""
    return RunConfig.model_validate(
        {"model": MODEL, "data": {"seq_len": TOKENS}, "train": {"steps": 100, "global_batch": ROWS * sites}}
    )


def rows(rank: int, device: torch.device, many: int = ROWS) -> Microbatch:
    """Return a rank's batch: numbers drawn at random, since only speed is measured."""
    tokens = torch.randint(1, MODEL["vocab_size"], (many, TOKENS + 1), generator=torch.Generator().manual_seed(rank))
    (batch,) = microbatches(tokens.int().numpy(), many, 0, device)
    return batch
