"""The matrix of faults, its asynchronous runs: a worker is killed, one joins late, a server is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from argosy.observe.events import Metrics
from commands import Folder
from ports import free_port
from waiting import PATIENT_S

STEPS = 20


class Parts:
    """The parts of an asynchronous run, each started by a command of its own, or all by one, whose name is ""."""

    def __init__(self, folder: Folder, steps: int = STEPS, servers: int = 1, sites: str = "ABC", **sync: Any):
        self.folder, self.started = folder, dict[str, subprocess.Popen[str]]()
        run_file = folder.write_run(steps=steps, every_steps=5, processes=1)
        text = run_file.read_text().replace("microbatch=2,", "microbatch=2,sync=async,")
        keys = {**({"servers": [f"127.0.0.1:{free_port()}" for _ in range(servers)]} if servers else {}), **sync}
        text += "\n[sync]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        text += "".join(f'\n[[sites]]\nname = "{name}"\n' for name in sites)
        run_file.write_text(text)

    @property
    def path(self) -> Path:
        return self.folder.path / "runs/tiny"

    def start(self, name: str, **variables: str) -> None:
        part = ("--site", name) if name else ()
        self.started[name] = self.folder.start("train", "run.toml", *part, **variables)

    def updates(self) -> list[dict[str, Any]]:
        path = self.path / "ledger.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def events(self, process: str) -> list[dict[str, Any]]:
        path = self.path / "events" / f"{process}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def kill(self, name: str) -> None:
        """Kill all processes of a part at once."""
        self.signal(name, signal.SIGKILL)
        self.started.pop(name).communicate()

    def signal(self, name: str, number: signal.Signals) -> None:
        process = self.started[name]
        for pid in [*children_of(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self, name: str) -> str:
        """Ask a part to save and end; returns what it said."""
        process = self.started.pop(name)
        process.terminate()
        out, err = process.communicate(timeout=PATIENT_S)
        assert process.returncode == 128 + signal.SIGTERM, out + err
        return out + err

    def end(self) -> dict[str, str]:
        said = {}
        for name, process in self.started.items():
            out, err = process.communicate(timeout=PATIENT_S)
            assert process.returncode == 0, f"{name}: {out}{err}"
            said[name] = out + err
        return said

    def check(self, steps: int = STEPS) -> None:
        """Each sample was trained on once, and the loss has fallen as it does."""
        updates = self.updates()
        assert [line["update"] for line in updates] == list(range(steps))
        assert sorted(line["item"] for line in updates) == list(range(steps))
        losses = [record["loss"] for record in Metrics(self.path).read() if "loss" in record]
        assert len(losses) == steps
        assert losses[-1] < losses[0] - 0.3


def children_of(pid: int) -> list[int]:
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                children += (thread / "children").read_text().split()
        found = {int(child) for child in children}
        return [*found, *(deeper for child in found for deeper in children_of(child))]
    return []


def wait(is_so: Callable[[], bool], timeout_s: float = 120.0) -> None:
    until = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until, "it did not come to be so"
        time.sleep(0.02)


@pytest.fixture
def parts(tmp_path: Path, corpus: Path) -> Iterator[Callable[..., Parts]]:
    made: list[Parts] = []

    def make(**keys: Any) -> Parts:
        made.append(Parts(Folder(tmp_path, corpus), **keys))
        return made[-1]

    yield make
    for one in made:
        for name in list(one.started):
            one.kill(name)


@pytest.mark.slow
def test_a_worker_is_killed_one_joins_late_and_the_server_is_killed(parts):
    run = parts(steps=STEPS, patience_s=5)
    run.start("server-1", ARGOSY_FAULTS="kill@server:step=12")
    for name in "ABC":  # who has made an update waits for the others, or the run might be over before they begin
        run.start(name)
        wait(lambda name=name: name in {line["site"] for line in run.updates()})
        if name != "C":
            run.signal(name, signal.SIGSTOP)
    run.kill("A")
    run.signal("B", signal.SIGCONT)
    wait(lambda: any(event["event"] == "server_died" for event in run.events("server-1-holder")))
    said = run.end()
    run.check()
    kinds = [event["event"] for event in run.events("server-1")]
    assert kinds.count("servers_begin") == 2
    begun = [event for event in run.events("server-1") if event["event"] == "servers_begin"]
    assert begun[1]["step"] == 10  # the newest checkpoint before the update that it died in
    assert begun[1]["lost"] in (2, 3)
    assert "worker_left" in kinds
    assert "died: signal SIGKILL; it is started again" in said["server-1"]
    assert {"B", "C"} <= {line["site"] for line in run.updates()}


@pytest.mark.slow
def test_one_command_holds_all_parts_saves_when_it_is_stopped_and_goes_on(parts):
    run = parts(servers=0, shards=2, sites="AB")
    run.start("", ARGOSY_FAULTS="slow@forward:factor=3")
    wait(lambda: len(run.updates()) >= 2)
    said = run.stop("")
    assert "the same command goes on" in said, said
    made = len(run.updates())
    assert made < STEPS
    run.start("")
    run.end()
    run.check()
    (begun,) = [event for event in run.events("server-1") if event["event"] == "servers_begin"][1:]
    assert (begun["step"], begun["lost"]) == (made, 0)


@pytest.mark.slow
def test_one_of_two_servers_is_killed_and_both_go_back_to_the_same_checkpoint(parts):
    run = parts(steps=20, servers=2)
    run.start("server-1")
    run.start("server-2", ARGOSY_FAULTS="kill@server:step=12")
    run.start("B")
    run.end()
    run.check(20)
    begun = [event for event in run.events("server-1") if event["event"] == "servers_begin"]
    assert [event["step"] for event in begun] == [0, 10]
    assert begun[1]["lost"] in (2, 3)
