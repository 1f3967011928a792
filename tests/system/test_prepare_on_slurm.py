"""Text is prepared on the nodes of a real SLURM: the same bytes, whatever is killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import Folder
from slurm import WHERE_FROM, Slurm, is_installed, slurm
from waiting import wait_until

pytestmark = pytest.mark.skipif(not is_installed(), reason=WHERE_FROM)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm"), nodes=2) as running:
        yield running


@pytest.fixture
def texts(folder: Folder, cluster: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    """A folder with a text of several pieces."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    line = '{"text": "' + "Some words of a text, which is long. " * 40
    with (folder.path / "texts.jsonl").open("w") as file:
        for number in range(24_000):
            file.write(f'{line} {number} {number * number}"}}\n')
    yield folder
    cluster.ask("scancel", "--user=root")


WORDS = ("prepare", "texts.jsonl", "--vocab-size", "300", "--engine", "huggingface", "--shard-tokens", "400000")
ON_SLURM = ("--on", "slurm", "--processes", "3")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_small_text_is_prepared_there(texts: Folder) -> None:
    (texts.path / "a.txt").write_text("Some words of a text. " * 2000)
    words = ("prepare", "a.txt", "--vocab-size", "300", "--validation-fraction", "0")
    said = texts.argosy(*words, "--out", "out", *ON_SLURM)
    assert "out: 1 document from 1 file" in said
    texts.argosy_here(*words, "--out", "local")
    assert contents(texts.path / "out") == contents(texts.path / "local")


@pytest.mark.slow
def test_the_bytes_are_those_of_one_machine_whatever_is_killed(texts: Folder, cluster: Slurm) -> None:
    texts.argosy(*WORDS, "--out", "local")
    work = texts.path / "out" / ".prepare"

    caller = texts.start(*WORDS, "--out", "out", *ON_SLURM)
    wait_until(lambda: list(work.glob("results/*.claim")))
    first = next(task for task in cluster.ask("squeue", "-h", "-r", "-t", "R", "-o", "%i").split())
    cluster.ask("scancel", "--signal=KILL", "--full", first)  # a worker
    wait_until(lambda: list((texts.path / "out").glob("train-*.bin")), 120)
    caller.send_signal(signal.SIGKILL)  # the caller
    caller.wait()
    assert not (texts.path / "out" / "manifest.json").exists()

    of_the_first = set(cluster.ask("squeue", "-h", "-o", "%A").split())
    caller = texts.start(*WORDS, "--out", "out", *ON_SLURM)
    wait_until(lambda: set(cluster.ask("squeue", "-h", "-o", "%A").split()) - of_the_first)  # it has come so far
    wait_until(lambda: len(list((texts.path / "out").glob("train-*.bin"))) > 2, 120)
    cluster.ask("scancel", "--user=root")  # all workers
    caller.send_signal(signal.SIGTERM)
    assert caller.wait(30) == 143
    wait_until(lambda: not cluster.ask("squeue", "-h"))

    texts.argosy(*WORDS, "--out", "out", *ON_SLURM)
    assert contents(texts.path / "out") == contents(texts.path / "local")
    assert not work.exists()


def test_what_slurm_refuses_is_said_and_leaves_nothing(texts: Folder) -> None:
    refused = texts.argosy_here(*WORDS, "--out", "out", *ON_SLURM, "--partition", "fast", code=2)
    assert "sbatch refuses" in refused and "invalid partition" in refused
    refused = texts.argosy_here(*WORDS, "--out", "out", "--on", "slurm", code=2)
    assert "--processes 0: with --on slurm, say how many workers to start" in refused
    assert not (texts.path / "out").exists()
