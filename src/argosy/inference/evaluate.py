"""The score of a trained model on held-out text, under any plan."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from argosy.errors import UserError
from argosy.inference.members import open_together, score_in_processes
from argosy.inference.plans import plan_named, run_to_score
from argosy.inference.rank_model import EvaluateRequest, score
from argosy.inference.trained_model import default_device
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.evaluation import Score


def evaluate(
    path: str | Path,
    data: str | Path | None = None,
    *,
    split: Literal["train", "validation"] = "validation",
    max_tokens: int = 1_000_000,
    seq_len: int | None = None,
    plan: str | Plan = "",
    trust_code: bool = False,
    world: World | None = None,
) -> Score:
    """Return loss, perplexity and bits per byte of the model of a run, a checkpoint or a Hugging Face folder at `path`.

    data: a folder that `argosy prepare` wrote, or its URL in a store; by default the run's own sources. seq_len: tokens
    per window; by default those that the run trained with. plan: as of `load_model`. trust_code: approve and run code
    that the run brings along. world: as of `LoadedModel`.

    Raises: UserError if the data has another tokenizer, or is too short, or the plan cannot lay the model out.
    """
    source = open_together(path, trust_code, world)
    folders = [str(data)] if data is not None else source.run.data.folders
    if not folders:
        raise UserError(f"{path}: the run names no data. Give a prepared folder with --data.")
    length = seq_len or source.run.data.seq_len
    if length > (most := source.run.model.max_seq_len):
        raise UserError(f"seq_len = {length} is more than model.max_seq_len = {most}. Try {most} or less.")
    asked = EvaluateRequest(list(folders), split, max_tokens, length)
    layout = plan_named(plan)
    run_to_score(source.run, layout, length)  # what is wrong is said before processes start
    if world is None and layout.world_size > 1:
        return score_in_processes(source, layout, asked)
    return score(source, layout, world or World(device=default_device()), asked.read(source))
