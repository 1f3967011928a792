"""Runs whose data lie in an object store train as those beside a local disk, whatever the store and the cache do."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from commands import Folder
from object_store import ObjectStore, Proxy, environment, needs_server
from tiny import MODEL, losses, train_in
from waiting import PATIENT_S

pytestmark = needs_server
STEPS = 30


def metrics(run_dir: Path, key: str) -> list[Any]:
    path = run_dir / "metrics.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [line[key] for line in lines if key in line]


def events(run_dir: Path) -> list[str]:
    return [
        json.loads(line)["event"]
        for path in (run_dir / "events").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[ObjectStore]:
    server = ObjectStore(tmp_path_factory.mktemp("moto") / "log")
    server.put(corpus, "corpus")
    yield server
    server.stop()


@pytest.fixture
def proxy(server: ObjectStore) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    with environment(proxy.endpoint):
        yield proxy
    proxy.close()


@pytest.fixture(scope="module")
def local(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses beside a local disk."""
    folder = Folder(tmp_path_factory.mktemp("local"), corpus)
    run = load(folder.write_run(steps=STEPS, every_steps=STEPS, processes=1))
    model = run.model.model_copy(update={"vocab_size": MODEL["vocab_size"]})
    return losses(train_here(run.model_copy(update={"model": model}), folder.path / "runs/tiny"))


def train_here(run: RunConfig, run_dir: Path) -> list[dict[str, Any]]:
    """Train in this process."""
    return train_in(World(), run, Plan.parse(run.plan), run_dir)


def write_run(folder: Folder, size_gb: float = 1.0, timeout_s: float = 60, **keys: int) -> Path:
    path = folder.write_run(**{"steps": STEPS, "processes": 1, **keys})
    text = re.sub(r"sources = .*", 'sources = { "s3://data/corpus" = 1.0 }', path.read_text())
    cache = f'\n[data.cache]\nfolder = "{folder.path}/cache"\nsize_gb = {size_gb}\ntimeout_s = {timeout_s}\n'
    path.write_text(text.replace("\n[train]", cache + "\n[train]"))
    return folder.path / "runs/tiny"


def test_a_run_from_a_store_has_the_losses_of_one_from_the_disk(
    folder: Folder, proxy: Proxy, local: list[float]
) -> None:
    run_dir = write_run(folder, every_steps=STEPS)
    proxy.flips = 1
    folder.argosy_here("train", "run.toml")
    assert metrics(run_dir, "loss") == local
    assert "block_damaged" in events(run_dir)
    assert sum(line["fetched_bytes"] for line in metrics(run_dir, "cache"))
    # Another run of the same data finds all in the cache: manifest and tokenizer are asked for, nothing is fetched.
    passed = proxy.passed_bytes
    assert losses(train_here(load(run_dir / "run.toml"), folder.path / "runs/second")) == local
    assert proxy.passed_bytes - passed < 2**16
    found = metrics(folder.path / "runs/second", "cache")
    assert sum(line["hits"] for line in found) and not any(line["misses"] or line["fetched_bytes"] for line in found)
    text = "".join(path.read_text(errors="replace") for path in folder.path.glob("runs/**/*.*") if path.is_file())
    assert "not-so-secret" not in text


@pytest.mark.slow
def test_a_killed_run_goes_on_with_a_cache_of_one_block(folder: Folder, proxy: Proxy, local: list[float]) -> None:
    run_dir = write_run(folder, size_gb=0.0003)
    process = folder.start("train", "run.toml")
    while len(metrics(run_dir, "loss")) < STEPS // 2:
        time.sleep(0.02)
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    folder.argosy("train", "run.toml")
    assert metrics(run_dir, "loss") == local
    assert len(list((folder.path / "cache/shards").glob("*/0*[0-9]"))) <= 1


@pytest.mark.slow
def test_an_outage_is_waited_for_and_one_that_is_too_long_ends_with_what_to_do(
    folder: Folder, proxy: Proxy, server: ObjectStore, local: list[float]
) -> None:
    run_dir = write_run(folder, size_gb=0.0003, processes=2)
    process = folder.start("train", "run.toml", "--resilience.hang-s", "3")
    while not metrics(run_dir, "loss"):
        time.sleep(0.02)
        assert process.poll() is None
    proxy.is_cut = True
    time.sleep(8)
    proxy.is_cut = False
    assert process.wait(timeout=PATIENT_S) == 0, process.communicate()
    assert metrics(run_dir, "loss") == pytest.approx(local, rel=1e-4)  # two ranks add in another order
    assert {"store_unreachable", "store_back"} <= set(events(run_dir))
    assert "worker_died" not in events(run_dir)  # a rank that waits for the store does not hang

    shutil.rmtree(run_dir)
    write_run(folder, size_gb=0.0003, timeout_s=1)
    process = folder.start("train", "run.toml")
    while not metrics(run_dir, "loss"):
        time.sleep(0.02)
    proxy.is_cut = True
    out, err = process.communicate(timeout=PATIENT_S)
    assert process.returncode == 75, out + err
    assert "s3://data/corpus has not answered for" in out + err
    assert "data.cache.timeout_s" in out + err
    assert "Traceback" not in out + err
    proxy.is_cut = False
    folder.argosy("train", "run.toml")
    assert metrics(run_dir, "loss") == local


@pytest.mark.slow
def test_a_cache_on_a_full_disk_is_smaller(folder: Folder, proxy: Proxy, local: list[float]) -> None:
    run_dir = write_run(folder)
    (folder.path / "cache").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder.path / "cache")]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a small disk is mounted by root only")
    try:
        folder.argosy("train", "run.toml")
        assert metrics(run_dir, "loss") == local
        assert list((folder.path / "cache/shards").glob("*/0*[0-9]"))
    finally:
        subprocess.run(["umount", "--lazy", str(folder.path / "cache")], check=True)


def test_prepared_data_are_copied_to_a_store_and_evaluated_there(folder: Folder, proxy: Proxy) -> None:
    (folder.path / "text").mkdir()
    for number in range(40):
        (folder.path / f"text/{number}.txt").write_text(f"a text of {number} and more " * 40)
    words = ("prepare", "text", "--out", "data/mine", "--vocab-size", "300", "--validation-fraction", "0.3")
    said = folder.argosy_here(*words, "--remote", "s3://data/mine")
    assert "copying to s3://data/mine" in said
    folder.argosy_here(*words, "--remote", "s3://data/mine")
    refused = folder.argosy_here(
        *words[:4], "--vocab-size", "400", "--out", "data/other", "--remote", "s3://data/mine", code=2
    )
    assert "--remote s3://data/mine: holds other prepared data" in refused
    missing = folder.argosy_here(
        "prepare", "--out", "data/mine", *words[1:2], *words[4:], "--remote", "s3://none/x", code=2
    )
    assert "there is no such bucket" in missing
