"""Parameter servers and workers of an asynchronous run that one command launches, each by an engine of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commands import Folder
from launched_jobs import kill_jobs, runs
from ports import free_port
from waiting import wait_until

PACED = "slow@batch:seconds=0.5"
"""What is waited for must come before the run's end."""


def write(
    folder: Folder, launch: str, *, servers: int = 2, steps: int = 40, site: str = 'launch = { on = "local" }'
) -> Path:
    """A run of two workers, and of servers with this line of the table sync."""
    run_file = folder.write_run(steps=steps, every_steps=4, processes=1)
    text = run_file.read_text().replace("microbatch=2,", "microbatch=2,sync=async,")
    text += f"\n[sync]\nservers = {json.dumps([f'127.0.0.1:{free_port()}' for _ in range(servers)])}\n{launch}\n"
    text += "".join(f'\n[[sites]]\nname = "{name}"\n{site}\n' for name in "AB")
    run_file.write_text(text)
    return folder.path / "runs/tiny"


@pytest.fixture
def ended(folder: Folder) -> Iterator[None]:
    """Whatever becomes of the test, jobs that it launched end."""
    yield
    kill_jobs(folder.path)


def test_servers_and_workers_are_printed_as_their_engines_would_be_told(folder: Folder) -> None:
    write(folder, 'server_launch = [{ on = "slurm", partition = "cpu" }, { on = "ssh", hosts = "node2" }]')
    said = folder.argosy_here("launch", "run.toml", "--dry-run", "--train.steps", 8)
    first, rest = said.split("# site server-2, on ssh\n")
    assert first.startswith("# site server-1, on slurm\n#!/bin/bash\n#SBATCH --job-name=tiny-server-1\n")
    assert "#SBATCH --partition=cpu" in first and "--train.steps 8 --site server-1 --run-dir" in first
    second, worker, _ = rest.split("# site ")
    assert second.startswith("# node2\n") and "--site server-2" in second
    assert worker.startswith("A, on local\n")
    only = folder.argosy_here("launch", "run.toml", "--dry-run", "--site", "server-2")
    assert only.startswith("# site server-2, on ssh\n") and "# site A" not in only
    assert not (folder.path / "runs").exists()


@pytest.mark.parametrize(
    ("launch", "servers", "said"),
    [
        ('server_launch = [{ on = "local" }, { on = "local" }]', 3, "has 2 tables, and sync.servers names 3"),
        ('server_launch = [{ on = "local", nodes = 2 }]', 2, "server-1: a parameter server is one process"),
        ('server_launch = [{ on = "ssh", hosts = "a,b" }]', 2, "server-1: a parameter server is one process"),
        ('server_launch = [{ on = "ray" }]', 1, "Name another engine in sync.server_launch"),
        ('server_launch = [{ on = "local" }]', 0, "sync.servers is empty"),
        ('server_launch = [{ login = "me@there" }]', 1, "launch.folder"),
    ],
)
def test_what_servers_cannot_use_is_refused_and_nothing_is_started(
    folder: Folder, refused: Callable[..., str], launch: str, servers: int, said: str
) -> None:
    write(folder, launch, servers=servers)
    refused("launch", "run.toml", said=(said,))


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_servers_and_workers_are_launched_followed_stopped_and_launched_again(
    folder: Folder, ended: None, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """`again`: they are launched a second time too, and run to their end."""
    path = write(folder, 'server_launch = [{ on = "local" }]', servers=1)
    monkeypatch.setenv("ARGOSY_FAULTS", PACED)
    said = folder.argosy_here("launch", "run.toml")
    assert "launched tiny-server-1 on local" in said and "launched tiny-B on local" in said
    wait_until(lambda: (path / "ledger.jsonl").exists() and len((path / "ledger.jsonl").read_text().splitlines()) >= 2)
    assert "its job" in folder.argosy_here("launch", "run.toml", code=2)
    found = runs(folder)
    assert {name: run["state"] for name, run in found.items()} == dict.fromkeys(
        ("tiny", "tiny/sites/A", "tiny/sites/B", "tiny/sites/server-1"), "training"
    )
    folder.argosy_here("stop", "runs/tiny")
    wait_until(lambda: all(run["state"] not in ("training", "running") for run in runs(folder).values()))
    assert runs(folder)["tiny/sites/server-1"]["state"] == "stopped"
    log = folder.argosy_here("logs", "runs/tiny")
    assert "server-1 | " in log and "A | " in log and "B | " in log
    if again:
        monkeypatch.delenv("ARGOSY_FAULTS")
        folder.argosy_here("launch", "run.toml")
        assert "server-1 | " in folder.argosy_here("logs", "runs/tiny", "-f")
        assert runs(folder)["tiny/sites/server-1"]["state"] == "finished"
    updates = [json.loads(line) for line in (path / "ledger.jsonl").read_text().splitlines()]
    assert [line["update"] for line in updates] == list(range(len(updates)))
    if again:
        assert sorted(line["item"] for line in updates) == list(range(40))
    assert "perplexity" in folder.argosy_here("evaluate", "runs/tiny", "--max-tokens", 2000)
    assert folder.argosy_here("generate", "runs/tiny", "--prompt", "def ", "--max-tokens", 8, "--json")
    folder.argosy_here("checkpoint", "export", "runs/tiny", "--out", "exported")
    assert (folder.path / "exported/model.safetensors").exists()
    assert f"step-{len(updates):08}" in folder.argosy_here("checkpoint", "list", "runs/tiny")
