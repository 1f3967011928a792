"""Jobs that a test has launched."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from commands import Folder


def kill_jobs(folder: Path) -> None:
    """Kill all jobs of local engines and of hosts that were launched under `folder`."""
    for record in folder.rglob("job.json"):
        job = json.loads(record.read_text())
        pids = (
            [job["id"]] if job["engine"] == "local" else [a for n, a in job["place"].items() if n.startswith("agent")]
        )
        for pid in pids:
            with suppress(ProcessLookupError):
                os.killpg(int(pid.partition("@")[0]), signal.SIGKILL)


def runs(folder: Folder) -> dict[str, dict[str, Any]]:
    """Return what `argosy runs` says of each run, by its name."""
    return {run["id"]: run for run in folder.documents("runs")}
