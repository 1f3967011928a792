"""A tokenizer, and prepared folders made of given tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from argosy.data.manifest import TOKENIZER, Manifest, Shard
from argosy.data.shards import ShardWriter, token_dtype
from argosy.data.tokenizer import Tokenizer, train

settings.register_profile("data", settings(), max_examples=60)
settings.load_profile("data")

TEXTS = [f"def f{i}(x):\n    return x + {i}  # naïve, für {i}\n" for i in range(200)]

MakeFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained tokenizer.json of 300 tokens."""
    path = tmp_path_factory.mktemp("tokenizer") / TOKENIZER
    train(TEXTS, 300, path)
    return path


@pytest.fixture
def make_folder(tmp_path: Path, tokenizer_json: Path) -> MakeFolder:
    """make_folder(name, train=[[document, ...] of each shard], validation=...) writes a prepared folder."""
    return lambda name, **splits: write_folder(tmp_path / name, tokenizer_json, **splits)


def write_folder(folder: Path, tokenizer_json: Path, **splits: Sequence[Sequence[Sequence[int]]]) -> Path:
    """A prepared folder with these tokens, and 3 bytes of text for each."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer.load(tokenizer_json)
    (folder / TOKENIZER).write_bytes(tokenizer_json.read_bytes())
    written = {
        split: tuple(write_shard(folder / f"{split}-{i:05d}", shard, tokenizer) for i, shard in enumerate(shards))
        for split, shards in splits.items()
    }
    Manifest(
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        dtype="uint16",
        splits=written,
    ).save(folder)
    return folder


def write_shard(prefix: Path, documents: Sequence[Sequence[int]], tokenizer: Tokenizer) -> Shard:
    """One shard of these documents."""
    writer = ShardWriter(prefix, token_dtype(tokenizer.vocab_size))
    for document in documents:
        writer.write(np.array(document), np.array([len(document)]))
    return writer.close(text_bytes=3 * sum(map(len, documents)))


def damage(path: Path, offset: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
