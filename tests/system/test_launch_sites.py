"""Sites of a run that one command launches, each by an engine of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import Folder
from launched_jobs import kill_jobs, runs
from several_sites import SitesOfARun
from ssh import WHERE_FROM, Hosts, hosts, is_installed
from waiting import wait_until


def write(folder: Folder, first: str, second: str, **keys: Any) -> SitesOfARun:
    """A run of two sites with these tables `launch`."""
    run = SitesOfARun(folder, **keys)
    path = folder.path / "run.toml"
    text = path.read_text()
    for name, launch in (("A", first), ("B", second)):
        text = text.replace(f'name = "{name}"\n', f'name = "{name}"\nlaunch = {{ {launch} }}\n')
    path.write_text(text)
    return run


@pytest.fixture
def launched(folder: Folder) -> Iterator[Callable[..., SitesOfARun]]:
    """Write a run of two sites; whatever becomes of the test, jobs that it launched end."""

    yield lambda first, second, **keys: write(folder, first, second, **keys)
    kill_jobs(folder.path)


def test_each_site_is_printed_as_its_engine_would_be_told(folder: Folder) -> None:
    write(folder, 'on = "slurm", nodes = 3, partition = "gpu"', 'login = "me@lyon", folder = "/data/a b"')
    said = folder.argosy_here("launch", "run.toml", "--dry-run", "--train.steps", 12)
    oslo, lyon = said.split("# site B, on login\n")
    assert oslo.startswith("# site A, on slurm\n#!/bin/bash\n#SBATCH --job-name=tiny-A\n#SBATCH --nodes=3\n")
    assert "#SBATCH --partition=gpu" in oslo and "--site A" in oslo and "runs/tiny/sites/A" in oslo
    assert "cd '/data/a b' && argosy launch run.toml --train.steps 12 --site B --here" in lyon
    only = folder.argosy_here("launch", "run.toml", "--dry-run", "--site", "B", "--here")
    assert only.startswith("# site B, on local\n")
    assert not (folder.path / "runs").exists()


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ('login = "me@lyon"', 'on = "local"', "login = "),
        ('on = "ssh"', 'on = "local"', "--hosts"),
        ('on = "local", partition = "gpu"', 'on = "local"', "--partition has no meaning there"),
        ('on = "abacus"', 'on = "local"', "abacus"),
    ],
)
def test_a_table_that_cannot_be_is_refused_and_nothing_is_started(
    folder: Folder, refused: Callable[..., str], first: str, second: str, said: str
) -> None:
    write(folder, first, second)
    refused("launch", "run.toml", said=(said,))


def test_sites_without_addresses_are_refused(folder: Folder, refused: Callable[..., str]) -> None:
    write(folder, 'on = "local"', 'on = "local"', with_addresses=False)
    refused("launch", "run.toml", said=("no address of A, B is given",))


@pytest.mark.slow
def test_sites_on_this_machine_are_launched_followed_stopped_and_launched_again(
    folder: Folder, launched: Callable[..., SitesOfARun]
) -> None:
    run = launched('on = "local"', 'on = "local"', steps=60, is_paced=True)
    said = folder.argosy("launch", "run.toml")
    assert "launched tiny-A on local" in said and "launched tiny-B on local" in said
    assert "its job" in folder.argosy_here("launch", "run.toml", code=2)
    wait_until(lambda: len(run.ledger("B").lines) >= 2)
    assert {name: found["state"] for name, found in runs(folder).items()} == {
        "tiny/sites/A": "training",
        "tiny/sites/B": "training",
    }
    folder.argosy("stop", "runs/tiny")
    wait_until(lambda: all(found["state"] == "stopped" for found in runs(folder).values()))
    run.go()
    folder.argosy("launch", "run.toml")
    log = folder.argosy("logs", "runs/tiny", "-f")
    assert "A | " in log and "B | " in log
    assert all(found["state"] == "finished" for found in runs(folder).values())
    run.check_ledger()
    run.same_weights()


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason=WHERE_FROM)
def test_a_site_on_hosts_and_one_behind_a_login(
    folder: Folder, launched: Callable[..., SitesOfARun], tmp_path_factory: pytest.TempPathFactory
) -> None:
    there = tmp_path_factory.mktemp("there")
    argosy = Path(sys.executable).with_name("argosy")
    with hosts(tmp_path_factory.mktemp("ssh"), 2) as network:
        option = network.option.removeprefix("--extra=")
        run = launched(
            f'on = "ssh", hosts = "h1", extra = ["{option}"]',
            f'login = "h2", login_options = ["{option}"], folder = "{there}", argosy = "{_told(there, argosy)}"',
            steps=60,
        )
        said = folder.argosy("launch", "run.toml")
        assert "launched tiny-A on ssh: job h1" in said and "launched tiny-B on login: job h2 " in said
        assert (there / "runs/tiny/.secret").read_text() == (folder.path / "runs/tiny/.secret").read_text()
        log = folder.argosy("logs", "runs/tiny", "-f")
        assert "A | " in log and "B | " in log
        wait_until(lambda: runs(folder)["tiny/sites/B"]["state"] == "ended")
        assert "finished" in runs(folder)["tiny/sites/B"]["why"]
        assert runs(folder)["tiny/sites/A"]["state"] == "finished"
        assert (there / "runs/tiny/sites/B/ledger.jsonl").read_text() == (run.path("A") / "ledger.jsonl").read_text()
        assert "has ended already" in folder.argosy_here("stop", "runs/tiny")
        lost = _lose(network, folder)
        assert "no way to h2" in lost


def _told(there: Path, argosy: Path) -> str:
    """Write a program that is `argosy` with the environment of this one: ssh passes none on. Returns its path."""
    program = there / "argosy"
    path = os.environ.get("PYTHONPATH", "")
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" OMP_NUM_THREADS=1 exec {argosy} "$@"\n')
    program.chmod(0o755)
    return str(program)


def _lose(network: Hosts, folder: Folder) -> str:
    """What is said of a site to which there is no way any more."""
    network.lose("h2")
    return str(runs(folder)["tiny/sites/B"]["why"])
