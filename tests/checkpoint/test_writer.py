"""The process that writes: it starts light, and nothing is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from argosy.checkpoint.save import WriterProcess


@pytest.fixture
def memory() -> int:
    return os.memfd_create("test")


def test_it_imports_nothing_heavy():
    heavy = "{'torch', 'numpy', 'pydantic', 'fsspec', 'safetensors'}"
    code = f"import sys, argosy.checkpoint.writer; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_it_ends_when_its_orders_end(memory):
    process = WriterProcess(memory)
    assert process.reap() == "exit code 0"


def test_it_says_when_all_is_done(memory):
    process = WriterProcess(memory)
    process.send({"order": "close"})
    assert process.news(20.0) == [{"news": "closed"}]
    process.reap()


def test_signals_that_are_meant_for_training_do_not_end_it(memory):
    process = WriterProcess(memory)
    process.send({"order": "close"})
    process.news(20.0)
    assert os.getsid(process.pid) != os.getsid(0)
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.2)
    assert process.news(0.0) == [] and process.is_open
    process.kill()
    assert process.reap() == "signal SIGKILL"
    assert not process.is_open


def test_an_order_for_a_dead_one_is_an_error(memory):
    process = WriterProcess(memory)
    os.kill(process.pid, signal.SIGKILL)
    while process.is_open:
        process.news(1.0)
    with pytest.raises(BrokenPipeError):
        while True:  # the kernel closes its pipes one after the other
            process.send({"order": "close"})
    process.reap()
