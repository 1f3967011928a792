"""Measure a trained model: loss on held-out text, or scores on tasks of lm-eval.

Examples:
  argosy evaluate runs/demo                                 on the held-out part of its own data
  argosy evaluate runs/demo --data data/mine --split train  on other text, prepared with its tokenizer
  argosy evaluate runs/demo --plan tp=2                     laid out over two devices
  argosy evaluate runs/demo --tasks arc_easy,mine.yaml      scores on tasks
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from argosy.cli.documents import answer
from argosy.cli.options import ModelPath, ModelPlan, must_be_folder, parse
from argosy.config.section import WholeCount
from argosy.errors import UserError
from argosy.inference.plans import plan_named
from argosy.observe.report import task_in_words
from argosy.observe.terminal import told_if_long

TOKENS_SCORED = 1_000_000
"""Tokens of held-out text that are read, if nothing is asked for."""


@dataclass(frozen=True)
class Options:
    path: ModelPath
    data: Path | None = None
    """A folder that `argosy prepare` wrote; the run's own data if not given."""
    split: Literal["train", "validation"] = "validation"
    """Split of the data."""
    max_tokens: WholeCount = TOKENS_SCORED
    """Largest number of tokens to read."""
    seq_len: WholeCount | None = None
    """Tokens per window, data.seq_len of the run if not given; of a task its longest question, else the context."""
    tasks: str = ""
    """Tasks to score instead, separated by commas: names that lm-eval knows, or task files (*.yaml)."""
    task_limit: WholeCount = 0
    """Largest number of documents of each task; 0: all."""
    fewshot: int | None = None
    """Examples before each question of a task; as the task says if not given."""
    plan: ModelPlan = ""
    trust_code: bool = False
    """Approve and run code that the run (extend.files) or a task file brings along; otherwise only code that you
    trained with."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True)
class ScoredTask:
    """A task with its scores."""

    task: str
    metrics: dict[str, float]
    """Metric -> value; METRIC_stderr is the standard error of METRIC."""


def main(argv: list[str]) -> None:
    options = parse(argv, "argosy evaluate", Options)
    if options.max_tokens < 1 or (options.seq_len is not None and options.seq_len < 1):
        raise UserError("--max-tokens and --seq-len must be at least 1.")
    plan = plan_named(options.plan)
    must_be_folder(options.path, or_url=True)
    of_text = (options.data, options.split, options.max_tokens)
    if options.tasks and of_text != (None, "validation", TOKENS_SCORED):
        raise UserError(
            "--data, --split and --max-tokens are for held-out text, and --tasks have data of their own. Leave them "
            "out; --task-limit takes a part of these."
        )
    if not options.tasks and (options.task_limit or options.fewshot is not None):
        raise UserError("--task-limit and --fewshot are of --tasks. Name the tasks, or leave them out.")
    measured = _tasks if options.tasks else _held_out_text
    with told_if_long("argosy evaluate: reading the data and the model, and scoring"):
        from argosy.inference.members import launched_world

        with launched_world(plan) as world:
            how = {"seq_len": options.seq_len, "plan": plan, "trust_code": options.trust_code, "world": world}
            document, values, words = measured(options, how)
    if world is not None and not world.is_first:
        return
    answer(options.json, document, "\n".join(words), *values)


Measured = tuple[str, list[Any], list[str]]
"""The name of a document, its values, and the same as lines for a person."""


def _held_out_text(options: Options, how: dict[str, Any]) -> Measured:
    from argosy.inference.evaluate import evaluate

    score = evaluate(options.path, options.data, split=options.split, max_tokens=options.max_tokens, **how)
    if score.accuracy is not None:
        words = f"loss {score.loss:.4f} nats per pair   {score.accuracy:.2%} of pairs told apart"
    else:
        words = (
            f"loss {score.loss:.4f} nats per token   perplexity {score.perplexity:.2f}   "
            f"{score.bits_per_byte:.4f} bits per byte   ({score.tokens} tokens)"
        )
    return "evaluate", [score], [words]


def _tasks(options: Options, how: dict[str, Any]) -> Measured:
    from argosy.inference.evaluate import evaluate_tasks

    names = [name.strip() for name in options.tasks.split(",") if name.strip()]
    scores = evaluate_tasks(options.path, names, fewshot=options.fewshot, limit=options.task_limit, **how)
    values = [ScoredTask(task, metrics) for task, metrics in scores.items()]
    return "evaluate-tasks", values, [task_in_words(task, metrics) for task, metrics in scores.items()]
