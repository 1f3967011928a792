"""The screen: what all processes of a run say comes to one surface, and nobody waits for it."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from argosy.observe import screen as module
from argosy.observe import terminal
from argosy.observe.panel import RunView
from argosy.observe.screen import SCREEN, Line, Progress, Screen, as_line, read_lines_of
from argosy.observe.terminal import print_message
from argosy.watch.terminal import FolderView, duration
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
    with Screen(surface, FolderView):
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
    with Screen(surface, FolderView) as screen:
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
    with Screen(surface, FolderView) as screen:
        for line in ("\x1b_argosy {half", "\x1b_argosy [1]\x1b\\", as_line({"say": 3}), as_line({"unknown": 1})):
            screen.printed(line)
    assert surface.lines == []


def test_a_line_that_never_ends_is_not_kept(monkeypatch):
    monkeypatch.setattr(module, "LONGEST_LINE_BYTES", 9)
    reader, writer = os.pipe()
    surface = Recorder()
    with Screen(surface, FolderView) as screen:
        thread = threading.Thread(target=read_lines_of, args=(reader, screen))
        thread.start()
        os.write(writer, b"\r 10 %\r 20 %")
        wait_until(lambda: surface.lines)
        os.close(writer)
        thread.join()
    assert surface.lines == [("\r 10 %\r 20 %", "")]


def test_what_the_agent_waits_for_comes_before_what_a_worker_did_last():
    surface = Recorder()
    agent, worker = Progress(enabled=True, by="agent"), Progress(enabled=True)
    with Screen(surface, FolderView):
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
    with Screen(surface, FolderView) as screen:
        began = time.monotonic()
        for number in range(20_000):
            screen.take({"say": str(number)})
        assert time.monotonic() - began < 5
        is_released.set()
    assert surface.lines[-1] == ("19999", "")


def test_a_terminal_that_is_gone_stops_nobody():
    def gone() -> None:
        raise OSError

    with Screen(Recorder(gone), FolderView) as screen:
        screen.take({"say": "x"})
        screen.take({"say": "y"})


def test_the_last_step_stands_above_the_report(tmp_path: Path):
    surface = Recorder()
    line = '{"step": 9, "loss": 3.0, "tokens_per_s": 10.0, "mfu": 0.5, "step_time_s": 0.1, "seconds": {"step": 0.1}}\n'
    with Screen(surface, FolderView) as screen:
        screen.begin(tmp_path)
        (tmp_path / "metrics.jsonl").write_text(line)
        progress = Progress(enabled=True)
        progress.close()
        progress.say("done: 10 steps")
    assert [text.split()[0] for text, _ in surface.lines] == ["step", "done:"]


def test_messages_to_a_stderr_that_is_no_terminal_do_not_go_to_the_screen(capsys):
    surface = Recorder()
    with Screen(surface, FolderView):
        terminal.print_message("argosy: worker 0 died")
    assert surface.lines == [] and capsys.readouterr().err == "argosy: worker 0 died\n"


RECORD = {"step": 139, "loss": 3.4123, "tokens_per_s": 5120.0, "mfu": 0.614, "step_time_s": 0.402}


def show(progress: Progress, step: int, steps: int | None = 600) -> None:
    progress.step({**RECORD, "step": step}, steps, validation_loss=3.55, left_s=188.4)


def test_a_step_is_one_line(capsys):
    show(Progress(enabled=True), 139)
    assert capsys.readouterr().out == (
        " step   140/600  loss 3.412  val 3.550  5.1k tok/s  eta 3:08  MFU 61%  402 ms\n"
    )


def test_what_is_not_known_yet_is_left_out(capsys):
    Progress(enabled=True).step(RECORD, None, None, None)
    out = capsys.readouterr().out
    assert "140/?" in out and "val" not in out and "eta ?" in out


def test_no_run_computes_faster_than_the_peak(capsys):
    Progress(enabled=True).step({**RECORD, "mfu": 1.26}, 600, None, 0.0)
    assert "MFU n/a" in capsys.readouterr().out


def test_lines_are_seconds_apart_and_the_last_one_always_comes(capsys):
    progress = Progress(enabled=True)
    for step in range(600):
        show(progress, step)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["1/600", "600/600"]


def test_one_process_speaks_for_all(capsys):
    silent = Progress(enabled=False)
    show(silent, 0)
    silent.say("nothing")
    silent.close()
    assert capsys.readouterr().out == ""


def test_text_is_shown_as_it_is(capsys):
    Progress(enabled=True).say("[bold]runs/x[/bold] :smile: " + "long " * 100)
    assert capsys.readouterr().out == "[bold]runs/x[/bold] :smile: " + "long " * 100 + "\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0:00"),
        (0.4, "0:00"),
        (59.6, "1:00"),
        (188, "3:08"),
        (3599, "59:59"),
        (3600, "1:00:00"),
        (90061, "25:01:01"),
    ],
)
def test_durations_read_like_a_clock(seconds, text):
    assert duration(seconds) == text


class Terminal(io.StringIO):
    """A terminal of 80 columns; it keeps all that was written, as `screen` shows it."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        lines = [""]
        for token in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", self.getvalue()):
            if token == "\n":
                lines.append("")
            elif token == "\x1b[2K":
                lines[-1] = ""
            elif token != "\r" and not token.startswith("\x1b"):
                lines[-1] += token
        return lines


def in_terminal(monkeypatch):
    """Let this test's output go to a terminal, which is returned. No fixture: pytest sets stdout again after those."""
    made = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", made)
    monkeypatch.setattr(sys, "stderr", made)
    return made


def test_a_terminal_has_one_line_that_shows_what_is_done_now(monkeypatch):
    terminal = in_terminal(monkeypatch)
    progress = Progress(enabled=True)
    for step in (138, 139):
        show(progress, step)
    (line,) = terminal.screen()
    assert line.startswith(" step   140/600  loss 3.412") and line.endswith("402 ms") and len(line) < 80
    with progress.during("evaluating"):
        progress.doing("evaluating, batch 3 of 40")
        (line,) = terminal.screen()
        assert line.startswith(" step   140/600  evaluating, batch 3 of 40  loss 3.412") and len(line) < 80
    assert "evaluating" not in terminal.screen()[0]
    progress.close()
    assert terminal.screen()[0].startswith(" step   140/600") and terminal.screen()[1] == ""


def test_messages_of_any_process_stand_on_lines_of_their_own(monkeypatch):
    terminal = in_terminal(monkeypatch)
    progress = Progress(enabled=True)
    show(progress, 376)
    print_message("argosy: worker 0 died")
    assert terminal.screen() == ["argosy: worker 0 died", ""]
    progress.doing("setting up the model")
    progress.say(" step   376  evaluated", "cyan")
    first, second, live = terminal.screen()
    assert (first, second) == ("argosy: worker 0 died", " step   376  evaluated")
    assert "setting up the model" in live and "\x1b[36m" in terminal.getvalue()


def test_the_line_of_another_process_is_not_cleared_by_the_one_that_handed_it_over(monkeypatch):
    terminal = in_terminal(monkeypatch)
    agent, rank_0 = Progress(enabled=True), Progress(enabled=True)
    agent.doing("starting the processes")
    agent.hand_over()
    show(rank_0, 139)
    agent.doing("")
    assert terminal.screen()[0].startswith(" step   140/600")
    agent.doing("starting the processes")
    assert terminal.screen() == ["  starting the processes"]


def test_what_is_done_now_adds_no_lines_where_there_is_no_terminal(capsys):
    progress = Progress(enabled=True)
    progress.doing("evaluating")
    progress.close()
    print_message("argosy: worker 0 died")
    assert capsys.readouterr() == ("", "argosy: worker 0 died\n")


def test_what_takes_long_is_said_without_a_terminal_too(capsys, monkeypatch):
    monkeypatch.setattr(module, "BREAK_SILENCE_S", 0.05)
    progress, out = Progress(enabled=True), ""
    with progress.during("finding devices"):
        while not out:
            out = capsys.readouterr().out
            time.sleep(0.01)
    assert out == " finding devices (0:00)\n"
    Progress(enabled=False).doing("nothing")
    assert capsys.readouterr().out == ""
