"""A run without torch, for what strikes at runs: a launcher whose workers count steps, and are replaced when they die.

python fake_run.py RUN_DIR STEPS: state is a file with the number of steps made.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from argosy.observe.events import Events
from argosy.observe.heartbeat import Heartbeat, heartbeat_path, read_heartbeat

STEP_S = 0.05
SIZE = 2


def worker(run_dir: Path, scratch: Path, rank: int, generation: int, steps: int) -> None:
    heartbeat = Heartbeat(scratch)
    heartbeat.join(generation, rank, dict)
    made = run_dir / "made"
    while (step := int(made.read_text())) < steps:
        heartbeat.begin(step)
        time.sleep(STEP_S)
        heartbeat.took(STEP_S)
        if rank == 0:
            fresh = made.with_suffix(".new")
            fresh.write_text(str(step + 1))
            fresh.replace(made)


def launcher(run_dir: Path, steps: int) -> int:
    made, generations = run_dir / "made", run_dir / "generations"
    made.exists() or made.write_text("0")
    events = Events(run_dir, "launcher")
    scratch = Path(tempfile.mkdtemp(prefix=f"argosy-{os.getpid()}-", dir="/dev/shm"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    workers: list[subprocess.Popen[bytes]] = []
    try:
        while int(made.read_text()) < steps:
            generation = int(generations.read_text()) + 1 if generations.exists() else 1
            generations.write_text(str(generation))
            events.write("generation", generation=generation)
            command = [sys.executable, __file__, str(run_dir), str(steps), str(scratch), str(generation)]
            workers = [subprocess.Popen([*command, str(rank), str(os.getpid())]) for rank in range(SIZE)]
            _watch(workers, scratch, events)
    finally:
        for process in workers:
            process.kill()
            process.wait()
        shutil.rmtree(scratch)
    return 0


def _watch(workers: list[subprocess.Popen[bytes]], scratch: Path, events: Events) -> None:
    """Until all have ended well, or one has not or stands still."""
    beats = {process.pid: (0, time.monotonic()) for process in workers}
    while any(process.poll() is None for process in workers):
        for process in workers:
            reading = read_heartbeat(heartbeat_path(scratch, process.pid))
            if reading is not None and reading.beats != beats[process.pid][0]:
                beats[process.pid] = (reading.beats, time.monotonic())
            is_stopped = beats[process.pid][0] > 0 and time.monotonic() - beats[process.pid][1] > 3.0
            if process.poll() not in (None, 0) or is_stopped:
                events.write("worker_died", pid=process.pid)
                for other in workers:
                    other.kill()
                    other.wait()
                return
        time.sleep(0.02)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        sys.exit(launcher(Path(sys.argv[1]), int(sys.argv[2])))
    run_dir, steps, scratch, generation, rank, parent = sys.argv[1:]
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it dies with its launcher
    if os.getppid() == int(parent):
        worker(Path(run_dir), Path(scratch), int(rank), int(generation), int(steps))
