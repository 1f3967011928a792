"""A command that is tied to the process that started it ends with that, however that ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from argosy.processes.ray_process import tied

STARTER = """
import subprocess, sys
from argosy.processes.ray_process import tied
process = subprocess.Popen(tied(["sleep", "60"]))
print(process.pid, flush=True)
process.wait()
"""


def test_it_ends_with_a_starter_that_is_killed():
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    child = Path("/proc", starter.stdout.readline().strip())
    end = time.monotonic() + 20
    while (child / "cmdline").read_bytes() != b"sleep\x0060\0":
        assert time.monotonic() < end, "the command was not started"
        time.sleep(0.01)
    starter.send_signal(signal.SIGKILL)
    starter.communicate()
    while (child / "cmdline").exists() and (child / "cmdline").read_bytes():
        assert time.monotonic() < end, "it lives on"
        time.sleep(0.01)


def test_it_is_the_command_with_its_exit_code():
    words = tied([sys.executable, "-c", "print('here'); raise SystemExit(7)"])
    done = subprocess.run(words, check=False, capture_output=True)
    assert (done.stdout, done.returncode) == (b"here\n", 7)


def test_it_does_not_begin_without_its_starter():
    words = tied(["true"])
    words[3] = "1"  # another process's number
    assert subprocess.run(words, check=False).returncode == 1
