"""Evaluate a trained model on prepared text."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from argosy.data.stores.cache import Cache
from argosy.data.stores.source import open_source
from argosy.data.stores.store import is_url
from argosy.data.tokenizer import how_to_prepare
from argosy.errors import UserError
from argosy.inference.trained_model import open_checkpoint
from argosy.parallel.mesh import Meshes
from argosy.parallel.model import ParallelModel
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.evaluation import HeldOut, Score
from argosy.training.evaluation import evaluate as score

BATCH_TOKENS = 4096


def evaluate(
    path: str | Path,
    data: str | Path | None = None,
    *,
    split: Literal["train", "validation"] = "validation",
    max_tokens: int = 1_000_000,
    seq_len: int | None = None,
    trust_code: bool = False,
) -> Score:
    """Return loss, perplexity and bits per byte of the model of a run or checkpoint at `path`.

    data: a folder that `argosy prepare` wrote, or its URL in a store; by default the run's own sources. seq_len: tokens
    per window; by default those that the run trained with. trust_code: approve and run code that the run brings along.

    Raises: UserError if the data has another tokenizer, or is too short.
    """
    opened = open_checkpoint(Path(path), trust_code)
    folders = [str(data)] if data is not None else opened.run.data.folders
    if not folders:
        raise UserError(f"{path}: the run names no data. Give a prepared folder with --data.")
    cache = Cache(opened.run.data.cache) if any(map(is_url, folders)) else None
    sources = [open_source(folder, split, cache=cache) for folder in folders]
    for source in sources:
        if source.manifest.tokenizer_sha256 != opened.tokenizer.sha256:
            raise UserError(
                f"{source.name}: prepared with another tokenizer than {opened.run_dir}/tokenizer.json. Prepare the "
                f"text again with that one: {how_to_prepare(opened.run_dir)}"
            )
    length = seq_len or opened.run.data.seq_len
    held_out = HeldOut.read(sources, length, max_tokens)
    if not held_out.tokens:
        raise UserError(f"{folders[0]}: its {split} split is empty. Prepare it with a larger --validation-fraction.")
    model = ParallelModel(Plan(), opened.run, Meshes(), {0: opened.model(torch.device("cpu"))})
    return score(model, held_out, max(1, BATCH_TOKENS // length), World())
