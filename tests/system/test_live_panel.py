"""`argosy train` in a real pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from threading import Thread

import pytest

from commands import Folder
from emulator import Emulator
from waiting import PATIENT_S, wait_until


class Terminal:
    """A command in a pseudo-terminal, and what is to be seen there."""

    def __init__(self, folder: Folder, *words: object, columns: int = 80, **variables: str):
        self.emulator = Emulator(columns)
        self._main, end = pty.openpty()
        self._resize(columns)
        environment = {**os.environ, "TERM": "xterm-256color", **variables}
        environment.pop("COLUMNS", None)
        command = [sys.executable, "-m", "argosy", *map(str, words)]
        self.process = subprocess.Popen(
            command, cwd=folder.path, env=environment, stdin=end, stdout=end, stderr=end, start_new_session=True
        )
        os.close(end)
        Thread(target=self._read, daemon=True).start()

    def _resize(self, columns: int) -> None:
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("HHHH", self.emulator.rows, columns, 0, 0))

    def _read(self) -> None:
        try:
            while chunk := os.read(self._main, 1 << 16):
                self.emulator.feed(chunk.decode(errors="replace").replace("\r\n", "\n"))
        except OSError:  # its last process has ended
            pass

    def waits(self, holds: Callable[[str], bool]) -> str:
        """Wait until what is to be seen is as it should be; return it."""
        return wait_until(lambda: shown if holds(shown := self.shown()) else "", story=self.shown)

    def shown(self) -> str:
        return "\n".join(self.emulator.screen)


@pytest.fixture
def in_terminal(folder):
    """Start a command in a terminal; it ends with the test."""
    begun: list[Terminal] = []

    def start(*words: object, **variables: str) -> Terminal:
        begun.append(Terminal(folder, *words, **variables))
        return begun[-1]

    yield start
    for terminal in begun:
        terminal.process.kill()
        terminal.process.wait()


@pytest.mark.slow
def test_a_panel_lives_through_the_death_of_a_worker_and_leaves_nothing_when_it_is_killed(folder, in_terminal):
    folder.write_run(steps=100_000, every_steps=100_000)
    terminal = in_terminal("train", "run.toml", ARGOSY_FAULTS="kill@optimizer:step=12,rank=0")
    shown = terminal.waits(lambda shown: "which survivors have" in shown and " ranks " in shown)
    assert any("worker 0 (process " in line for line in terminal.emulator.lines)
    for name in (" tiny ", " step ", " time ", " plan ", " ranks ", "tok/s"):
        assert name in shown, shown
    terminal.process.send_signal(signal.SIGKILL)
    terminal.process.wait()
    time.sleep(1)
    emulator = terminal.emulator
    assert emulator.column == 0 and emulator.row == len(emulator.lines) - 1  # the prompt will stand below the panel


@pytest.mark.slow
def test_no_panel_in_a_terminal_that_cannot_show_one(folder, in_terminal):
    folder.write_run(steps=4, processes=1)
    terminal = in_terminal("train", "run.toml", TERM="dumb")
    terminal.waits(lambda shown: "next:" in shown)
    printed = "\n".join(terminal.emulator.lines)  # the status and the report have pushed steps off the screen
    assert "step     4/4" in printed and "█" not in printed
    assert terminal.process.wait(PATIENT_S) == 0


@pytest.mark.slow
def test_the_report_stands_below_the_last_step(folder, in_terminal):
    folder.write_run(steps=4, processes=1)
    terminal = in_terminal("train", "run.toml")
    terminal.waits(lambda shown: "next:" in shown)
    assert terminal.process.wait(PATIENT_S) == 0
    lines = [line for line in terminal.emulator.lines if line.startswith((" step     4/4", "done:", "next:"))]
    assert [line.split()[0] for line in lines] == ["step", "done:", "next:"]
