"""The scores of a trained model on held-out text and on tasks, under any plan."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from argosy.errors import UserError
from argosy.inference.members import open_together, scores_of
from argosy.inference.plans import plan_named, run_to_score
from argosy.inference.rank_model import EvaluateRequest
from argosy.inference.tasks import TaskRequest
from argosy.inference.trained_model import TrainedModel
from argosy.observe.events import JsonLines
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.evaluation import Score
from argosy.training.rows import TaskScores

LONGEST_QUESTION = 4096
"""Tokens of the longest question, where the model's context is longer."""
SCORES_FILE = "scores.jsonl"
"""File in a run's folder with a line for each time that tasks were scored."""


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
    length = _checked(seq_len or source.run.data.seq_len, source.run.model.max_seq_len)
    request = EvaluateRequest(list(folders), split, max_tokens, length)
    layout = plan_named(plan)
    with _names_of_a_call():
        run_to_score(source.run, layout, length)  # what is wrong is said before processes start
        found: Score = scores_of(source, layout, world, request)
    return found


def evaluate_tasks(
    path: str | Path,
    tasks: Sequence[str],
    *,
    fewshot: int | None = None,
    limit: int = 0,
    seq_len: int | None = None,
    plan: str | Plan = "",
    trust_code: bool = False,
    world: World | None = None,
) -> TaskScores:
    """Return task -> metric -> value of the model of a run, a checkpoint or a Hugging Face folder at `path`, and add
    them to `SCORES_FILE` of a run's folder.

    tasks: names that lm-eval knows, and task files (*.yaml). fewshot: examples before each question; None: as the task
    says. limit: documents of each task; 0: all. seq_len: tokens of the longest question; by default those of the
    model's context, 4096 at most. plan: as of `load_model`. trust_code: approve and run code that the run or a task
    file brings along. world: as of `LoadedModel`.

    Raises: UserError if no task is named, one is not known, its data cannot be had, or the plan cannot lay the model
    out.
    """
    if not tasks:
        raise UserError("tasks: none is named. Give one that lm-eval knows, such as arc_easy, or a task file (*.yaml).")
    if limit < 0 or (fewshot or 0) < 0:
        raise UserError(f"limit = {limit}, fewshot = {fewshot}: must be at least 0.")
    source, layout = open_together(path, trust_code, world), plan_named(plan)
    if source.run.model.score:
        raise UserError(f"{path} is a reward model: it scores pairs, and tasks ask for words. Leave the tasks out.")
    most = source.run.model.max_seq_len
    length = _checked(seq_len or min(most, LONGEST_QUESTION), most)
    with _names_of_a_call():
        run_to_score(source.run, layout, length)
    request = TaskRequest(list(tasks), fewshot, limit, length, trust_code)
    found: TaskScores = scores_of(source, layout, world, request)
    if isinstance(source, TrainedModel) and (world is None or world.is_first):
        done = source.checkpoint.step
        line = {"step": max(0, done - 1), "time_s": round(time.time(), 3), "plan": str(layout), "tasks": found}
        JsonLines(source.run_dir / SCORES_FILE).write({**line, "fewshot": fewshot, "limit": limit})
    return found


@contextmanager
def _names_of_a_call() -> Iterator[None]:
    """Let errors name the length of windows as it is given here, not as in a run file."""
    try:
        yield
    except UserError as problem:
        raise UserError(str(problem).replace("data.seq_len", "seq_len")) from None


def _checked(seq_len: int, most: int) -> int:
    """Return `seq_len`. Raises: UserError if the model's context, `most` tokens, is shorter."""
    if seq_len > most:
        raise UserError(f"seq_len = {seq_len} is more than model.max_seq_len = {most}. Try {most} or less.")
    return seq_len
