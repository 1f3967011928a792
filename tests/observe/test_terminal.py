"""What a process prints: it goes on when nobody reads that any more, and text of a run can only be read."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from pathlib import Path

import pytest

from argosy.observe import terminal
from argosy.observe.terminal import print_message, printable, told_if_long

PRINTS = """
import os, subprocess, sys
from pathlib import Path
from rich.console import Console
from argosy.observe.terminal import lasting_output
with lasting_output(Path(sys.argv[1])):
    print("one", flush=True)
    sys.stdin.readline()
    for number in range(3):
        print("two", flush=True)
        Console().print("three")
        subprocess.run(["echo", "four"], stderr=subprocess.DEVNULL)
        print("five", file=sys.stderr)
"""


@pytest.mark.parametrize("log", ["logs/launcher.log", "no/such/folder/log"])
def test_prints_that_nobody_reads_go_to_the_log_or_nowhere(tmp_path, log):
    path = tmp_path / log
    with subprocess.Popen(
        [sys.executable, "-c", PRINTS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"one\n"
        process.stdout.close()
        process.stderr.close()
        process.stdin.write(b"go on\n")
        process.stdin.close()
    assert process.returncode == 0
    if path.parent.is_dir():
        lines = path.read_text().splitlines()
        assert len([line for line in lines if "nobody reads" in line]) == 2, "once for each stream"
        assert [lines.count(word) for word in ("two", "three", "four", "five")] == [3] * 4


def test_a_full_disk_takes_what_is_printed_later(tmp_path):
    """/dev/full refuses everything; it is not taken for a reader that is gone."""
    path = tmp_path / "log"
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", PRINTS, str(path)], stdin=subprocess.DEVNULL, stdout=full, check=False,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert (done.returncode, done.stderr.splitlines()) == (0, ["five"] * 3)
    assert not path.exists()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("step 1\tloss 2.5\nüöß 語 \u200d", "step 1\tloss 2.5\nüöß 語 \u200d"),
        ("\x1b]0;title\x07\x1b[2J", "\\x1b]0;title\\x07\\x1b[2J"),
        ("over\rwritten\r\n", "over\\rwritten\n"),
        ("c1 \x9b2J \x7f", "c1 \\x9b2J \\x7f"),
        ("\u202etxt.exe \u2066", "\\u202etxt.exe \\u2066"),
        ("\ud800", "\\ud800"),
    ],
)
def test_what_steers_a_terminal_is_escaped_and_the_rest_stays(text, shown):
    assert printable(text) == shown


def test_messages_are_printed_so(capsys):
    print_message("runs/\x1b[2J: no run")
    assert capsys.readouterr().err == "runs/\\x1b[2J: no run\n"


def test_what_takes_long_says_so_once_and_nothing_afterwards(monkeypatch):
    monkeypatch.setattr(terminal, "TOLD_AFTER_S", 0.01)
    said = io.StringIO()  # capsys loses what another thread writes while it is read
    monkeypatch.setattr(sys, "stderr", said)
    with told_if_long("counting sheep"):
        while "counting sheep (0 s so far)" not in said.getvalue():
            time.sleep(0.001)
    with told_if_long("what is done at once"):
        monkeypatch.setattr(terminal, "TOLD_AFTER_S", 60.0)
    assert said.getvalue().count("counting") == 1
