"""Runs of several sites, as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from argosy.config.load import load
from argosy.sync.deal import RESERVE
from argosy.sync.layout import Sites
from argosy.sync.ledger import RoundLedger
from commands import Folder
from dealt_samples import assert_each_sample_once
from network import Network
from ports import free_port
from tiny import weights

H = 3
LONG_S = 400.0
"""What is waited for comes in seconds on a machine that has nothing else to do."""
PACE = """
import time
from argosy import extend

@extend.callback("before_step")
def pace(run):
    time.sleep(0 if (run.folder.parents[3] / "go").exists() else 0.4)
"""
"""Until the test says `go`, a site takes its time for each step: what is waited for must come before the run's end."""


@dataclass
class SitesOfARun:
    """A run of some sites, each started by a command of its own."""

    folder: Folder
    names: str = "AB"
    steps: int = 4 * H
    sync: dict[str, Any] = field(default_factory=dict)
    word: str = "diloco"
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    with_addresses: bool = True
    is_paced: bool = False
    net: Network | None = None
    """Each site is on a node of this network, of its name in small letters; else all are on this machine."""

    def __post_init__(self) -> None:
        run_file = self.folder.write_run(steps=self.steps, processes=1)
        text = run_file.read_text().replace("microbatch=2,", f"microbatch=2,sync={self.word},")
        text = text.replace("lr = 1e-2", "lr = 1e-2\neps = 1e-6")  # rounding must not decide a step
        text += "\n[sync]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in self.keys.items())
        for name in self.names:
            text += f'\n[[sites]]\nname = "{name}"\n'
            host = self.net.address(name.lower()) if self.net else "127.0.0.1"
            text += f'address = "{host}:{free_port()}"\n' if self.with_addresses else ""
        if self.is_paced:
            (self.folder.path / "pace.py").write_text(PACE)
            text += '\n[extend]\nfiles = ["pace.py"]\n'
        run_file.write_text(text)

    def go(self) -> None:
        """Have all sites train as fast as they can from now on."""
        (self.folder.path / "go").touch()

    @property
    def keys(self) -> dict[str, Any]:
        return {"every_steps": H, **self.sync}

    def start(self, name: str, *options: object, **variables: str) -> subprocess.Popen[str]:
        within = self.net.inside(name.lower()) if self.net else ()
        words = ("train", "run.toml", "--site", name, *options)
        self.started.append(self.folder.start(*words, within=within, **variables))
        return self.started[-1]

    def path(self, name: str) -> Path:
        return self.folder.path / "runs/tiny/sites" / name

    def ledger(self, name: str) -> RoundLedger:
        return RoundLedger(self.path(name))

    def events(self, name: str, process: str = "exchange") -> list[dict[str, Any]]:
        path = self.path(name) / "events" / f"{process}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, is_so: Callable[[], bool], timeout_s: float = LONG_S) -> None:
        until = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < until, f"it did not come to be so: {self.story()}"
            ended = [process for process in self.started if process.poll() not in (None, 0, -signal.SIGKILL)]
            assert not ended, [process.communicate() for process in ended]
            time.sleep(0.02)

    def end(self, timeout_s: float = LONG_S) -> None:
        self.go()
        for process in self.started:
            said, problem = process.communicate(timeout=timeout_s)
            assert process.returncode in (0, -signal.SIGKILL), said + problem

    def kill(self, process: subprocess.Popen[str]) -> None:
        """Kill all processes of a site at once."""
        for pid in [*children_of(process.pid), process.pid]:
            kill_process(pid)
        process.wait()

    def takes_part(self, name: str, seen_by: str) -> bool:
        """True if the site took part in the newest round that another has."""
        last = self.ledger(seen_by).last
        return last is not None and name in last.tokens

    def story(self) -> dict[str, Any]:
        """How far each site is, for messages."""
        return {name: (len(self.ledger(name).lines), self.events(name)[-3:]) for name in self.names}

    def check_ledger(self) -> RoundLedger:
        """All sites have the same ledger, in which no sample is there twice or lost."""
        ledger = self.ledger(self.names[0])
        for name in self.names[1:]:
            assert [line.chain for line in self.ledger(name).lines] == [line.chain for line in ledger.lines]
        run = load(self.path(self.names[0]) / "run.toml")
        assert_each_sample_once(Sites.of(run, self.path(self.names[0])).shares, ledger.lines)
        trained = [some for line in ledger.lines for ranges in line.samples.values() for some in ranges]
        assert all(end < RESERVE for _, end in trained)
        return ledger

    def same_weights(self) -> dict[str, torch.Tensor]:
        """The weights that all sites have ended with, bit for bit."""
        first, *others = [weights(self.path(name)) for name in self.names]
        for other in others:
            assert all(torch.equal(first[name], other[name]) for name in first)
        return first


def children_of(pid: int) -> list[int]:
    """All processes that descend from `pid`."""
    parents = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
    found, new = [], [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


def kill_process(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def several_sites(folder: Folder) -> Iterator[Callable[..., SitesOfARun]]:
    """Make runs of several sites; whatever becomes of the test, their processes end."""
    made: list[SitesOfARun] = []

    def make(**keys: Any) -> SitesOfARun:
        made.append(SitesOfARun(folder, **keys))
        return made[-1]

    try:
        yield make
    finally:
        for run in made:
            for process in run.started:
                if process.poll() is None:
                    run.kill(process)
