"""A process that hangs says where, even with Python's lock held."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from argosy.observe import stack

HANGS = {
    "sleeps": "import time; time.sleep(60)",
    "holds the lock": "import ctypes; [ctypes.PyDLL(None).sleep(60) for _ in range(9)]",  # a signal ends one of them
}
CODE = """
import sys
from argosy.observe.stack import write_when_asked
write_when_asked(2)
def here():
    print("ready", flush=True)
    {hang}
here()
"""


@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS)
def test_it_writes_its_stacks_and_lives_on(tmp_path: Path, hang: str) -> None:
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-c", CODE.format(hang=hang)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    process.stdout.readline()
    stack.ask(process.pid)
    try:
        assert "in here" in (tmp_path / "log").read_text() and process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_one_that_is_gone_is_not_asked() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    stack.ask(process.pid)
