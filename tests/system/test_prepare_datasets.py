"""Data sets in the layout of Hugging Face datasets, from a folder and from a hub over HTTP."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commands import Folder
from hub import hub

pytest.importorskip("huggingface_hub", reason="pip install 'argosy[hub]'")


def parquet(first: int, rows: int) -> bytes:
    out = io.BytesIO()
    texts = [f"text {number} of a data set " * 5 for number in range(first, first + rows)]
    pq.write_table(pa.table({"id": list(range(rows)), "content": texts}), out, row_group_size=20)
    return out.getvalue()


@cache
def files() -> dict[str, bytes]:
    """The data set, by path: made once, and not where the tests are only collected."""
    return {
        "README.md": b"# A card, which is no text to train on",
        "data/train-00000-of-00002.parquet": parquet(0, 100),
        "data/train-00001-of-00002.parquet": parquet(100, 100),
        "data/test-00000-of-00001.parquet": parquet(200, 30),
        "data/validation-00000-of-00001.parquet": parquet(300, 30),
    }


WORDS = ("--vocab-size", "300", "--field", "content", "--validation-fraction", "0")


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with hub("team/texts", files()) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".bin", ".idx")}


def test_the_hub_s_train_split_is_that_of_a_folder(folder: Folder, endpoint: None) -> None:
    for name, data in files().items():
        (folder.path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.path / "texts" / name).write_bytes(data)
    said = folder.argosy_here("prepare", "texts", "--out", "local", *WORDS)
    assert "local: 200 documents from 2 files; 2 files of other splits than train not read" in said
    said = folder.argosy("prepare", "hf://datasets/team/texts", "--out", "hub", *WORDS)
    assert "hub: 200 documents from 2 files; 2 files of other splits than train not read" in said
    assert contents(folder.path / "hub") == contents(folder.path / "local")
    named = folder.argosy("prepare", "hf://datasets/team/texts/data/test-*", "--out", "test", *WORDS)
    assert "test: 30 documents from 1 file" in named
    stamps = json.loads((folder.path / "hub" / "manifest.json").read_text())
    assert stamps["other_splits"] == 2


def test_what_is_wrong_is_said(folder: Folder, endpoint: None) -> None:
    said = folder.argosy("prepare", "hf://datasets/team/texts", "--out", "out", code=2)
    assert "no column 'text'; the file has 'id', 'content'. Set --field" in said.replace("\n", " ")
    said = folder.argosy("prepare", "hf://datasets/team/nothing", "--out", "out", code=2)
    assert "hf://datasets/team/nothing" in said
    assert not (folder.path / "out").exists()
