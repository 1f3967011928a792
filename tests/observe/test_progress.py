"""What a person sees while a run goes, where there is no terminal."""

from __future__ import annotations

import pytest

from argosy.observe.progress import Progress, duration

RECORD = {"step": 139, "loss": 3.4123, "tokens_per_s": 5120.0, "mfu": 0.614, "step_time_s": 0.402}


def show(progress: Progress, step: int, steps: int | None = 600) -> None:
    progress.step({**RECORD, "step": step}, steps, validation_loss=3.55, left_s=188.4)


def test_a_step_is_one_line(capsys):
    show(Progress(enabled=True), 139)
    assert capsys.readouterr().out == (
        " step   140/600   loss 3.412   val 3.550   5.1k tok/s   MFU 61%   eta 3:08   step 402 ms\n"
    )


def test_what_is_not_known_yet_is_left_out(capsys):
    Progress(enabled=True).step(RECORD, None, None, 0.0)
    out = capsys.readouterr().out
    assert "140/?" in out and "val" not in out


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
