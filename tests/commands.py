"""The command line, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from argosy.cli import main
from argosy.cli import train as train_command
from waiting import PATIENT_S
from warm import WarmCommand

RUN_FILE = """
name = "tiny"
plan = "dp_replicate={processes},microbatch=2,precision=fp32,compile=false"

[model]
layers = 2
width = 32
heads = 4
kv_heads = 2
head_width = 8
ffn_width = 64

[data]
sources = {{ "{corpus}" = 1.0 }}
seq_len = 32

[train]
steps = {steps}
global_batch = 8

[optimizer]
lr = 1e-2

[schedule]
warmup_steps = 2

[evaluate]
every_steps = 5
tokens = 2000

[checkpoint]
every_steps = {every_steps}
every_minutes = 0

[launch]
processes = {processes}
threads = 1
device = "cpu"

[resilience]
node_check_s = 0.02
"""
"""A glance at the node's health, where half a second is usual: no run here has more to compute.

One thread for each process, as the tests' own: a second one would wait for the first in a loop, for matrices this
small; and how many threads add up is the same on one node and on several."""

FORKED = ("train", "sweep", "watch")
"""The commands that tests start most often."""


@dataclass
class Folder:
    """A working directory and the commands run in it."""

    path: Path
    corpus: Path
    starts_anew: bool = False
    """True if those of `FORKED` are started as a user's shell would, and not forked from a process with imports."""

    def write_run(self, name: str = "run.toml", *, steps: int = 10, every_steps: int = 2, processes: int = 2) -> Path:
        """A run file of the tiny model."""
        text = RUN_FILE.format(corpus=self.corpus, steps=steps, every_steps=every_steps, processes=processes)
        (self.path / name).write_text(text)
        return self.path / name

    def start(self, *words: object, within: Sequence[str] = (), **variables: str) -> subprocess.Popen[str]:
        """`argosy WORDS ...`, running, with environment variables of its own; `within` a command that becomes the one
        given after it.
        """
        given, environment = [str(word) for word in words], {**os.environ, "COLUMNS": "200", **variables}
        if given[0] in FORKED and not (self.starts_anew or within or "PYTHONPATH" in variables):
            return cast("subprocess.Popen[str]", WarmCommand(given, self.path, environment))
        command = [*within, sys.executable, "-m", "argosy", *given]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.path, env=environment, text=True, stdout=pipe, stderr=pipe)

    def argosy(self, *words: object, code: int = 0) -> str:
        """`argosy WORDS ...`, done; its exit code is `code`. Returns all that it printed."""
        process = self.start(*words)
        out, err = process.communicate(timeout=PATIENT_S)
        assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
        assert "Traceback" not in err or code == 1, err
        return out + err

    def documents(self, *words: object, code: int = 0, here: bool = True) -> list[Any]:
        """`argosy WORDS ... --json`, in this process or in one of its own: what it printed on stdout, line by line."""
        if here:
            out = self._run_here([*words, "--json"], code)[0]
        else:
            process = self.start(*words, "--json")
            out, err = process.communicate(timeout=PATIENT_S)
            assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
        return [json.loads(line) for line in out.splitlines()]

    def argosy_here(self, *words: object, code: int = 0) -> str:
        """The same in this process, which need not import torch again: for commands that leave signals alone."""
        return "".join(self._run_here(words, code))

    def _run_here(self, words: Sequence[object], code: int) -> tuple[str, str]:
        out, err, given = StringIO(), StringIO(), [str(word) for word in words]
        wide = patch.dict(os.environ, {"COLUMNS": "200"})
        # Most are refused: a process that imports torch is started when it is needed, and not ahead of that.
        late = patch.object(train_command, "STARTS_NOTHING", given)
        with wide, late, redirect_stdout(out), redirect_stderr(err), chdir(self.path), warnings.catch_warnings():
            found = main(given)
        assert found == code, f"exit code {found}\n{out.getvalue()}\n{err.getvalue()}"
        return out.getvalue(), err.getvalue()
