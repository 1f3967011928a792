"""A run in processes that exist already: those of torchrun, or of any launcher that sets the same environment."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

from argosy.checkpoint import fence
from argosy.config.schema import RunConfig
from argosy.data.manifest import TOKENIZER
from argosy.errors import ArgosyError
from argosy.extend.trust import approve
from argosy.launch import run_folder
from argosy.launch.devices import find_devices
from argosy.launch.joined_heartbeat import read_heartbeats
from argosy.launch.profile import check_profile
from argosy.launch.resolve import resolve
from argosy.launch.sites import settle_site
from argosy.observe.events import Events
from argosy.observe.progress import Progress
from argosy.observe.terminal import lasting_output
from argosy.parallel.world import World, join_world
from argosy.plan.plan import Plan
from argosy.processes.kept import kept_in_thread
from argosy.sinks.process import FollowerProcess
from argosy.sinks.table import check_sinks
from argosy.supervise.worker import work
from argosy.sync.sites.process import ExchangeProcess
from argosy.training.stop import StopSignal


def train_joined(run: RunConfig, run_dir: Path | None = None, *, accept_changes: bool = False) -> None:
    """Train in the world that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe.

    Rank 0 prepares the data and settles run and plan, while the others wait (at most launch.timeout_s: prepare large
    data beforehand). After a signal the run saves, and its processes exit with 128 + the signal's number.

    Raises: UserError, RunFailed, the same on every process.
    """
    is_first = os.environ["RANK"] == "0"
    run_dir = (run_dir or Path("runs") / run.name).absolute()
    run_folder.check_parts(run_dir, run)
    approve(run.extend.code)
    run, run_dir = settle_site(run, run_dir, Progress(enabled=is_first).say)
    stop = StopSignal().listen()
    world = join_world(run.launch)
    with lasting_output(run_dir / "logs" / f"rank-{world.rank}.log"), ExitStack() as held:
        try:
            run, plan, generation = world.share_first(
                lambda: _settle(run, run_dir, world, accept_changes, held), tuple[RunConfig, Plan, int]
            )
        except ArgosyError as error:
            if not world.is_first:
                sys.exit(error.exit_code)  # rank 0 reports it
            raise
        os.environ[fence.GENERATION] = str(generation)
        if world.is_first:
            events = Events(run_dir, "launcher")
            held.enter_context(kept_in_thread(FollowerProcess(run_dir, run, events), "argosy-follower"))
            held.enter_context(kept_in_thread(ExchangeProcess(run_dir, run, events), "argosy-exchange"))
        with read_heartbeats(run, run_dir, world, generation) as heartbeat:
            work(run, plan, world, run_dir, stop, heartbeat=heartbeat)
    if stop.number is not None:
        sys.exit(128 + stop.number)


def _settle(
    run: RunConfig, run_dir: Path, world: World, accept_changes: bool, held: ExitStack
) -> tuple[RunConfig, Plan, int]:
    """Return run, plan and generation; `held` keeps the run's folder locked."""
    check_sinks(run.observe, run.extend)
    held.enter_context(run_folder.locked(run_dir))
    progress = Progress(enabled=True)
    run, data = resolve(run, progress)
    run = run_folder.enter(run_dir, run, data.identity, accept_changes)
    devices = find_devices(run.launch, processes=world.size)
    plan = run_folder.settle_plan(run_dir, run, devices, progress.say)
    check_profile(run, plan)
    run = run_folder.write(run_dir, run, plan, data.sources[0].folder / TOKENIZER)
    generation = fence.newest_generation(run_dir) + 1
    fence.begin_generation(run_dir, generation)
    return run, plan, generation
