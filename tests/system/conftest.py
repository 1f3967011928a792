"""A folder to run commands in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Literal

import pytest
import torch

from argosy.config.data import PrepareConfig
from argosy.data.prepare import prepare
from argosy.models import hf
from commands import Folder
from matrix import PLANS, Disturbed
from shared import made_once
from tiny import decoder

Undisturbed = Callable[..., Disturbed]


@pytest.fixture
def folder(tmp_path: Path, corpus: Path) -> Folder:
    """An empty folder to work in."""
    return Folder(tmp_path, corpus)


@pytest.fixture
def refused(folder: Folder) -> Callable[..., str]:
    """Run a command, in this process, that must be refused: exit code 2, a message with all of `said`, no traceback,
    and nothing written.
    """

    def run(*words: object, said: tuple[str, ...]) -> str:
        before = set(folder.path.rglob("*"))
        text = folder.argosy_here(*words, code=2)
        assert set(folder.path.rglob("*")) == before
        for part in said:
            assert part in text, text
        assert "Traceback" not in text
        return text

    return run


@pytest.fixture(scope="session")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The run without faults under a plan, and with options: made once for each, by the first of the processes that
    the tests are spread over to need it. Its numbers do not depend on whose corpus it reads.
    """
    known: dict[tuple[str, ...], Disturbed] = {}

    def run(plan: str = PLANS["replicas"], *options: str) -> Disturbed:
        key = (plan, *options)
        if key not in known:
            name = f"undisturbed-{sha256(repr(key).encode()).hexdigest()[:16]}"

            def of(path: Path) -> Disturbed:
                return Disturbed(Folder(path, corpus), plan, options=options)

            known[key] = of(made_once(tmp_path_factory, name, lambda path: of(path).run_here().check(None)))
        return known[key]

    return run


@pytest.fixture(scope="session")
def tuning(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[str, ...]]:
    """Return the options of a run that fine-tunes: its data, which are prepared, and the weights it starts from."""
    folder = tmp_path_factory.mktemp("tuning")
    model = decoder()
    hf.export_folder(model.config, model.state_dict(), folder / "hf", dtype=torch.float32)

    def of(objective: Literal["sft", "dpo"], lines: int = 400) -> tuple[str, ...]:
        chats, out = folder / f"{lines}.jsonl", folder / f"{objective}-{lines}"
        answered = ({"prompt": f"{n}?", "completion": f"{2 * n}", "chosen": f"{2 * n}"} for n in range(lines))
        chats.write_text("\n".join(json.dumps({**answer, "rejected": "no"}) for answer in answered))
        prepare(
            PrepareConfig(
                input=(str(chats),), out=out, tokenizer=corpus / "tokenizer.json", chat_template="chatml",
                objective=objective, seq_len=128, processes=1,
            )
        )  # fmt: skip
        of_data = ("--data.sources", str(out), "1.0", "--data.seq-len", "128")
        return ("--train.objective", objective, *of_data, "--model.weights", str(folder / "hf"))

    return of


@pytest.fixture
def disturbed(folder: Folder) -> Iterator[Callable[..., Disturbed]]:
    """A run that is to be disturbed; whatever becomes of the test, it ends."""
    begun: list[Disturbed] = []

    def run(plan: str = PLANS["replicas"], faults: str = "", *options: str, within: Sequence[str] = ()) -> Disturbed:
        begun.append(Disturbed(folder, plan, faults, options, tuple(within)))
        return begun[-1].start()

    yield run
    for one in begun:
        if one.process is not None and one.process.poll() is None:
            one.process.kill()
            one.process.communicate()
