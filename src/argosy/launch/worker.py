"""A worker process: joins its world, trains its part of the run in the folder that it is given."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.errors import FINAL, ArgosyError
from argosy.parallel.world import LAUNCHER, World, join_world, leave_world
from argosy.plan.plan import Plan
from argosy.training.loop import train
from argosy.training.stop import StopSignal


def work(run: RunConfig, plan: Plan, world: World, run_dir: Path, stop: StopSignal) -> None:
    """Train in an existing world, and leave it."""
    try:
        train(run, plan, world, run_dir, stop)
    finally:
        leave_world()


def main() -> None:
    """Entry of the processes that `launch.local` starts: `python -m argosy.launch.worker RUN_DIR`.

    What goes wrong is left for the launcher, which knows whose error came first and tells the user that one.
    """
    get_error_handler().initialize()
    run_dir = Path(sys.argv[1])
    stop = StopSignal().listen()
    _die_with_parent()
    try:
        run, plan = load(run_dir / "run.toml"), Plan.load(run_dir / "plan.toml")
        work(run, plan, join_world(run.launch), run_dir, stop)
    except Exception as error:
        get_error_handler().record_exception(error)
        sys.exit(FINAL + error.exit_code if isinstance(error, ArgosyError) else 1)


def _die_with_parent() -> None:
    """End this process when the one that started it is gone, however it went: no orphan trains on."""
    launcher = int(os.environ[LAUNCHER])  # getppid() would name another one if it is gone already

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="argosy-watch-parent", daemon=True).start()


if __name__ == "__main__":
    main()
