"""A command that is tied to the process that started it ends with that, however that ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from argosy.processes.ray_cluster import tied
from waiting import wait_until

STARTER = """
import subprocess, sys
from argosy.processes.ray_cluster import tied
process = subprocess.Popen(tied(["sleep", "60"]))
print(process.pid, flush=True)
process.wait()
"""


def test_it_ends_with_a_starter_that_is_killed():
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    child = Path("/proc", starter.stdout.readline().strip())
    wait_until(lambda: (child / "cmdline").read_bytes() == b"sleep\x0060\0")
    starter.send_signal(signal.SIGKILL)
    starter.communicate()
    wait_until(lambda: not (child / "cmdline").exists() or not (child / "cmdline").read_bytes())


def test_it_is_the_command_with_its_exit_code():
    words = tied([sys.executable, "-c", "print('here'); raise SystemExit(7)"])
    done = subprocess.run(words, check=False, capture_output=True)
    assert (done.stdout, done.returncode) == (b"here\n", 7)


def test_it_does_not_begin_without_its_starter():
    words = tied(["true"])
    words[3] = "1"  # another process's number
    assert subprocess.run(words, check=False).returncode == 1
