"""The process that writes: it starts light, and nothing is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from argosy.checkpoint.save import WRITER
from argosy.processes.child import Child


@pytest.fixture
def writer() -> Iterator[Child]:
    memory = os.memfd_create("test")
    child = Child(WRITER, str(memory), pass_fds=[memory])
    os.close(memory)
    yield child
    child.kill()


def test_it_imports_nothing_heavy():
    heavy = "{'torch', 'numpy', 'pydantic', 'fsspec', 'safetensors'}"
    code = f"import sys, argosy.checkpoint.writer; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_it_ends_when_its_orders_end(writer):
    writer.channel.send("close")
    writer.hear(20.0)
    assert writer.reap() == "exit code 0"


def test_it_says_when_all_is_done(writer):
    writer.channel.send("close")
    assert writer.hear(20.0) == [{"kind": "closed"}]


def test_signals_that_are_meant_for_training_do_not_end_it(writer):
    writer.channel.send("close")
    writer.hear(20.0)
    assert os.getsid(writer.pid) != os.getsid(0)
    os.kill(writer.pid, signal.SIGTERM)
    time.sleep(0.2)
    assert writer.hear(0.0) == [] and writer.is_alive
