"""The training loop: it is read from top to bottom, and knows nothing of layouts, or of how replicas agree."""

from __future__ import annotations

from pathlib import Path

from argosy.config.schema import RunConfig
from argosy.observe.heartbeat import UNREAD, Heartbeat
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.parts import Parts
from argosy.training.state import Survivor
from argosy.training.stop import StopSignal
from argosy.training.trainer import Trainer


def train(
    run: RunConfig,
    plan: Plan,
    world: World,
    run_dir: Path,
    stop: StopSignal,
    survivor: Survivor | None = None,
    heartbeat: Heartbeat = UNREAD,
) -> bool:
    """Train `run` as `plan` lays it out, from the newest checkpoint in `run_dir` or from the start.

    Every process of `world` calls it; it returns when all steps are done, or early, with the state saved, once
    `stop` is requested of any of them. The report is in the run folder.

    `survivor`: what this process brings from the world before, and may bring to the next should this one end.
    `heartbeat`: where it shows its progress. Returns True if nothing is left to do.
    """
    with Trainer(Parts(run, plan, world, run_dir, stop, survivor or Survivor(), heartbeat)) as trainer:
        trainer.restore_or_initialize()
        for step in trainer.remaining_steps():
            batch = trainer.batch(step)
            loss = trainer.forward_backward(batch)
            outcome = trainer.exchange(loss)
            if trainer.accepts(outcome) and trainer.update(outcome):
                trainer.evaluate_if_due()
                trainer.observe()
                trainer.save_if_due(outcome)
            if outcome.requests.stop or trainer.is_stopped_early:
                break
        return trainer.finish()
