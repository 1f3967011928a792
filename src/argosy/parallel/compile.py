"""torch.compile where the time goes: each block (compiled once, as they are alike) and the loss of a chunk."""

from __future__ import annotations

import os
from pathlib import Path

from argosy.models.decoder import Decoder

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "argosy" / "inductor"


def keep_compile_cache() -> None:
    """Let compiled kernels outlive the process, so that only the first run of a model waits for them."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE))


def compile_blocks(model: Decoder, enabled: bool) -> None:
    """Compile `model`'s blocks in place."""
    if enabled:
        keep_compile_cache()
        for block in model.blocks:
            block.compile()
