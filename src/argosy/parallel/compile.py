"""Compiled blocks and loss, and kernels kept on disk between runs."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from argosy.models.decoder import Decoder
from argosy.parallel.tensor import VocabularyLoss

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "argosy" / "inductor"


def compile_blocks(model: Decoder, enabled: bool) -> None:
    """Compile `model`'s blocks (once, as they are alike), the last norm, and the loss of a chunk, in place."""
    if enabled:
        keep_compile_cache()
        for block in model.blocks.values():
            block.compile()
        if model.norm is not None:
            model.norm.compile()
        if isinstance(model.loss_of_chunk, VocabularyLoss):
            model.loss_of_chunk.compile()
        else:
            model.loss_of_chunk = torch.compile(model.loss_of_chunk)


def keep_compile_cache() -> None:
    """Keep compiled kernels on disk, so that only the first run of a model waits for them."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE))
