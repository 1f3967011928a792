"""The main loop: it is read from top to bottom, and knows nothing of layouts."""

from __future__ import annotations

from pathlib import Path

from argosy.config.schema import RunConfig
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.job import Job
from argosy.training.judge import Verdict
from argosy.training.stop import StopSignal


def train(run: RunConfig, plan: Plan, world: World, run_dir: Path, stop: StopSignal) -> None:
    """Train `run` as `plan` lays it out, from the newest checkpoint in `run_dir` or from the start.

    Every process of `world` calls it; it returns when all steps are done, or early, with the state saved, once
    `stop` is requested of any of them. The report is in the run folder.
    """
    job = Job(run, plan, world, run_dir, stop)
    job.restore_or_initialize()
    for step in job.remaining_steps():
        batch = job.batch(step)
        outcome = job.forward_backward(batch)
        if job.judge(step, outcome) is Verdict.COMMIT:
            job.optimizer_step(step)
        job.evaluate_if_due(step)
        job.observe(step, outcome)
        job.save_if_due(outcome)
        if outcome.wishes.stop:
            break
    job.finish()
