"""Text is prepared by jobs of a real cluster of Ray: the same bytes, whatever is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import Folder
from ray_cluster import WHERE_FROM, Cluster, cluster, is_installed
from waiting import wait_until

pytestmark = [pytest.mark.skipif(not is_installed(), reason=WHERE_FROM), pytest.mark.slow]
WORDS = ("prepare", "texts.jsonl", "--vocab-size", "300", "--engine", "huggingface", "--shard-tokens", "400000")


def on_ray(running: Cluster) -> tuple[str, ...]:
    return ("--on", "ray", "--processes", "3", "--address", running.address)


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster("n1", "n2") as started:
        yield started


@pytest.fixture
def texts(folder: Folder, running: Cluster, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A folder with a text of several pieces."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")  # what --address says goes before it
    line = '{"text": "' + "Some words of a text, which is long. " * 40
    with (folder.path / "texts.jsonl").open("w") as file:
        for number in range(24_000):
            file.write(f'{line} {number} {number * number}"}}\n')
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def workers(folder: Path) -> list[int]:
    """Return the processes that prepare text in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().decode(errors="replace").split("\0") if path.exists() else []
        if "argosy.data.worker" in words and any(word.startswith(str(folder)) for word in words):
            found.append(int(path.parent.name))
    return found


def test_the_bytes_are_those_of_one_machine_whatever_is_killed(texts: Folder, running: Cluster) -> None:
    texts.argosy(*WORDS, "--out", "local")
    work = texts.path / "out" / ".prepare"

    caller = texts.start(*WORDS, "--out", "out", *on_ray(running))
    wait_until(lambda: list(work.glob("results/*.claim")))
    os.kill(workers(texts.path)[0], signal.SIGKILL)
    wait_until(lambda: list((texts.path / "out").glob("train-*.bin")))
    running.lose("n2")
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    assert not (texts.path / "out" / "manifest.json").exists()
    wait_until(lambda: not workers(texts.path))  # they end with their caller

    running.add("n2")
    said = texts.argosy(*WORDS, "--out", "out", *on_ray(running))
    assert "out: 24000 documents from 1 file" in said
    assert contents(texts.path / "out") == contents(texts.path / "local")
    assert not work.exists()


def test_a_stopped_caller_ends_its_workers(texts: Folder, running: Cluster) -> None:
    caller = texts.start(*WORDS, "--out", "out", *on_ray(running))
    wait_until(lambda: list((texts.path / "out" / ".prepare").glob("results/*.claim")))
    caller.send_signal(signal.SIGTERM)
    assert caller.wait(30) == 143
    wait_until(lambda: not workers(texts.path))


def test_no_cluster_and_options_of_slurm_are_refused(texts: Folder, running: Cluster) -> None:
    refused = texts.argosy(*WORDS, "--out", "out", *on_ray(running), "--partition", "fast", code=2)
    assert "--on ray: --partition has no meaning there" in refused
    refused = texts.argosy(*WORDS, "--out", "out", "--on", "ray", "--processes", "3", code=2)
    assert "--on ray: no cluster of Ray answers at 127.0.0.1:9" in refused
    refused = texts.argosy(*WORDS, "--out", "out", "--on", "kubernetes", "--processes", "3", code=2)
    assert "Expected one of ('slurm', 'ray', 'local')" in refused
    refused = texts.argosy(*WORDS, "--out", "out", "--address", running.address, code=2)
    assert "--on local: --address has no meaning" in refused
