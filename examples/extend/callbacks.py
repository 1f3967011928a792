"""Callbacks: numbers beside the loss in metrics.jsonl, and a file of the best evaluations."""

import math

from argosy import extend


@extend.callback("after_step")
def perplexity(run: extend.Run) -> None:
    run.log(perplexity=math.exp(min(run.loss, 20.0)))


@extend.callback("evaluate")
def note_evaluations(run: extend.Run) -> None:
    if run.rank == 0:
        with (run.folder / "evaluations.csv").open("a") as file:
            file.write(f"{run.step},{run.validation_loss:.4f}\n")
