"""The matrix of faults: shards of data that are damaged, before a run and while it reads them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from argosy.data.manifest import Manifest, write_checksums
from commands import Folder
from matrix import PLANS, Disturbed
from tiny import MODEL, prepare_corpus


@pytest.fixture(scope="module")
def many_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus, in many shards: in 24 steps of 8 samples a run meets all of them."""
    return prepare_corpus(tmp_path_factory.mktemp("corpus") / "many", shard_tokens=150_000)


@pytest.fixture
def damaged(many_shards: Path, tmp_path: Path) -> Folder:
    """A folder to work in, with a corpus of its own that may be damaged."""
    return Folder(tmp_path, shutil.copytree(many_shards, tmp_path / "corpus"))


def cut_off(shard: Path) -> None:
    with shard.open("rb+") as file:
        file.truncate(shard.stat().st_size // 2)


def change(shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def put_in_a_strange_token(shard: Path) -> None:
    """One that is not in the vocabulary, with checksums as if it belonged there."""
    tokens = np.fromfile(shard, "<u2")
    tokens[len(tokens) // 2] = MODEL["vocab_size"] + 7
    tokens.tofile(shard)
    write_checksums(shard)


HARMS = {"truncated": cut_off, "changed": change, "strange token": put_in_a_strange_token}


def shard_of(folder: Folder) -> Path:
    """The one in the middle."""
    manifest = Manifest.load(folder.corpus)
    shards = manifest.splits["train"]
    assert len(shards) > 3, "too few to lose one"
    return folder.corpus / f"{shards[len(shards) // 2].name}.bin"


def elsewhere(folder: Folder, plan: str = PLANS["replicas"], *options: str) -> Disturbed:
    """Another run on the same data."""
    path = folder.path / "elsewhere"
    path.mkdir()
    return Disturbed(Folder(path, folder.corpus), plan, options=options)


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["truncated", "changed", "strange token"])
def test_a_bad_shard_is_left_out_by_all_ranks_alike_if_it_may_be(damaged, harm):
    shard = shard_of(damaged)
    HARMS[harm](shard)
    run = Disturbed(damaged, options=("--data.on_bad_shard", "skip")).start().end()
    found = run.events("bad_shard")
    assert found and {e["outcome"] for e in found} == {"quarantined"}
    assert all(shard.name in e["problem"] and e["samples"] for e in found), found
    replaced = [number for e in run.events("samples_replaced") for number in e["samples"]]
    assert replaced and len(replaced) == len(set(replaced)), "each is told of once"
    run.check(None, "bad_shard")

    again = elsewhere(damaged, "dp_replicate=1,microbatch=2", *run.options).start().end()
    assert run.losses() == pytest.approx(again.losses(), rel=1e-5), "at any number of ranks the same stand in for them"


@pytest.mark.slow
@pytest.mark.parametrize("harm", HARMS)
def test_a_bad_shard_ends_the_run_with_its_name_if_it_may_not_be_left_out(damaged, undisturbed, harm):
    shard = shard_of(damaged)
    kept = {path: path.read_bytes() for path in (shard, shard.with_suffix(".crc32"))}
    HARMS[harm](shard)
    run = Disturbed(damaged).start().end(code=65)
    assert (shard.name in run.text and "Restore" in run.text) or "prepare" in run.text
    if harm != "truncated":  # which is found before anything starts
        found = run.events("bad_shard")
        assert found and {e["outcome"] for e in found} == {"stop"} and all(e["samples"] for e in found)
    run.check_nothing_is_left()

    for path, data in kept.items():
        path.write_bytes(data)
    healthy = elsewhere(damaged).start().end()
    run.start().end()
    run.check(healthy, *(("bad_shard",) if harm != "truncated" else ()))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_shard_that_is_cut_off_while_it_is_read(damaged, policy):
    """The kernel kills who touches what is gone of a mapped file; who reads it next finds out why."""
    options = ("--data.on_bad_shard", policy)
    shard = shard_of(damaged)
    run = Disturbed(damaged, PLANS["replicas"], "slow@forward:seconds=0.1", options).start().wait_for_step(5)
    cut_off(shard)
    if policy == "stop":
        run.end(code=65)
        assert shard.name in run.text
        run.check_nothing_is_left()
    else:
        run.end()
        assert shard.name in run.events("bad_shard")[0]["problem"]
        run.check(None, "bad_shard", *{e["event"] for e in run.events("worker_died")})
