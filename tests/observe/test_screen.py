"""The screen: what all processes of a run say comes to one surface, and nobody waits for it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from argosy.observe import terminal
from argosy.observe.progress import SCREEN, Progress
from argosy.observe.run_view import RunView
from argosy.observe.screen import Line, Screen, packed, read_lines_of
from waiting import wait_until


class Recorder:
    """A surface that remembers."""

    def __init__(self, wait: Callable[[], object] = lambda: None):
        self.lines: list[Line] = []
        self.views: list[RunView] = []
        self._wait = wait

    def show(self, lines: list[Line], view: RunView) -> None:
        self._wait()
        self.lines += lines
        self.views.append(view)

    def close(self, lines: list[Line], view: RunView, is_told: bool) -> None:
        self.show(lines, view)


def test_messages_of_this_process_are_lines_that_stay():
    surface = Recorder()
    with Screen(surface):
        Progress(enabled=True).say("evaluated", "cyan")
        Progress(enabled=False).say("of another rank")
    assert surface.lines == [("evaluated", "cyan")]
    assert terminal.owner is None


def test_workers_say_it_through_what_they_print(monkeypatch, capsys):
    monkeypatch.setenv(SCREEN, "1")
    worker = Progress(enabled=True)
    worker.say("a line\nand another", "red")
    worker.doing("evaluating")
    printed = capsys.readouterr().out
    assert all(line.startswith("\x1b_argosy ") and line.endswith("\x1b\\") for line in printed.splitlines())
    reader, writer = os.pipe()
    surface = Recorder()
    with Screen(surface) as screen:
        os.write(writer, b"[W socket.cpp] a library's \xff words\nno newline" + printed.encode() + b"the end")
        os.close(writer)
        read_lines_of(reader, screen)
        wait_until(lambda: any(view.doing == "evaluating" for view in surface.views))
    assert surface.lines == [
        ("[W socket.cpp] a library's � words", ""),
        ("no newline", ""),
        ("a line\nand another", "red"),
        ("the end", ""),
    ]


def test_a_message_that_is_damaged_is_left_out():
    surface = Recorder()
    with Screen(surface) as screen:
        for line in ("\x1b_argosy {half", "\x1b_argosy [1]\x1b\\", packed({"say": 3}), packed({"unknown": 1})):
            screen.printed(line)
    assert surface.lines == []


def test_what_the_agent_waits_for_comes_before_what_a_worker_did_last():
    surface = Recorder()
    agent, worker = Progress(enabled=True, by="agent"), Progress(enabled=True)
    with Screen(surface):
        agent.doing("")
        worker.doing("evaluating")
        agent.hand_over()
        wait_until(lambda: bool(surface.views) and surface.views[-1].doing == "evaluating")
        agent.doing("recovering")
        wait_until(lambda: surface.views[-1].doing == "recovering")
        agent.hand_over()
        worker.step({"step": 3}, 10, None, None)
        wait_until(lambda: surface.views[-1].doing == "")


def test_nobody_waits_for_a_terminal_that_takes_nothing():
    is_released = threading.Event()
    surface = Recorder(is_released.wait)
    with Screen(surface) as screen:
        began = time.monotonic()
        for number in range(20_000):
            screen.take({"say": str(number)})
        assert time.monotonic() - began < 5
        is_released.set()
    assert surface.lines[-1] == ("19999", "")


def test_a_terminal_that_is_gone_stops_nobody():
    def gone() -> None:
        raise OSError

    with Screen(Recorder(gone)) as screen:
        screen.take({"say": "x"})
        screen.take({"say": "y"})


def test_the_last_step_stands_above_the_report(tmp_path: Path):
    surface = Recorder()
    line = '{"step": 9, "loss": 3.0, "tokens_per_s": 10.0, "mfu": 0.5, "step_time_s": 0.1, "seconds": {"step": 0.1}}\n'
    with Screen(surface) as screen:
        screen.begin(tmp_path)
        (tmp_path / "metrics.jsonl").write_text(line)
        progress = Progress(enabled=True)
        progress.close()
        progress.say("done: 10 steps")
    assert [text.split()[0] for text, _ in surface.lines] == ["step", "done:"]


def test_messages_to_a_stderr_that_is_no_terminal_do_not_go_to_the_screen(capsys):
    surface = Recorder()
    with Screen(surface):
        terminal.print_message("argosy: worker 0 died")
    assert surface.lines == [] and capsys.readouterr().err == "argosy: worker 0 died\n"
