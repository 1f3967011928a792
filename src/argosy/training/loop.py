"""The main loop: it is read from top to bottom, and knows nothing of layouts."""

from __future__ import annotations

from pathlib import Path

from argosy.config.schema import RunConfig
from argosy.observe.vitals import Vitals
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.job import Job
from argosy.training.judge import Verdict
from argosy.training.state import Survivor
from argosy.training.stop import StopSignal


def train(
    run: RunConfig,
    plan: Plan,
    world: World,
    run_dir: Path,
    stop: StopSignal,
    survivor: Survivor | None = None,
    vitals: Vitals | None = None,
) -> bool:
    """Train `run` as `plan` lays it out, from the newest checkpoint in `run_dir` or from the start.

    Every process of `world` calls it; it returns when all steps are done, or early, with the state saved, once
    `stop` is requested of any of them. The report is in the run folder.

    `survivor`: what this process brings from the world before, and may bring to the next should this one end.
    `vitals`: what it shows of itself meanwhile. Returns whether nothing is left to do.
    """
    with Job(run, plan, world, run_dir, stop, survivor or Survivor(), vitals) as job:
        job.restore_or_initialize()
        for step in job.remaining_steps():
            batch = job.batch(step)
            loss = job.forward_backward(batch)
            verdict = job.judge(step, loss)
            if verdict is Verdict.COMMIT:
                job.apply(step)
                job.evaluate_if_due()
                job.observe()
                job.save_if_due()
            else:
                job.set_aside(step, verdict)
            if job.is_asked_to_stop:
                break
        return job.finish()
