"""What `argosy stacks` makes of the answers in a run's folder."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from argosy.cli import stacks

WORKER = {"rank": 0, "pid": 7, "phase": "forward", "step": 3, "phase_s": 0.5, "stack": ""}


@pytest.fixture
def answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`argosy stacks` of a run, where these files become answers to it."""

    def ask(**files: bytes) -> int:
        (tmp_path / "run.toml").write_text("[launch]\nnodes = 2\n")

        def answer(*_: Any) -> None:
            (folder,) = (path for path in (tmp_path / "stacks").iterdir() if path.is_dir())
            for name, data in files.items():
                (folder / f"{name}.json").write_bytes(data)

        monkeypatch.setattr(stacks, "wait_until", answer)
        with (tmp_path / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return stacks.main([str(tmp_path)])

    return ask


def an_answer(**worker: Any) -> bytes:
    return json.dumps({"time_s": 1.0, "node": "a", "why": "asked for", "workers": [WORKER | worker]}).encode()


@pytest.mark.parametrize(
    "other",
    [
        an_answer(phase_s="long"),
        an_answer(rank=[0]),
        an_answer(stack=5),
        an_answer(collectives=[1]),
        b'{"workers": [{}]}',
        b"[" * 9000,
        b" " * 4001,
    ],
)
def test_a_file_that_is_no_answer_is_named_and_left_out(answered, other, monkeypatch, capsys):
    monkeypatch.setattr(stacks, "MOST_ANSWER_BYTES", 4000)
    assert answered(a=an_answer(), b=other) == 0
    out, err = capsys.readouterr()
    assert "rank 0: step 3, forward for 0.5 s" in out and "only 1 of 2 nodes answered" in out
    assert "b.json is no answer of an agent" in err
