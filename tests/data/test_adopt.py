from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from argosy.data.adopt import adopt
from argosy.data.manifest import Manifest, verify
from argosy.data.shards import TokenSource
from argosy.data.tokenizer import Tokenizer, train
from argosy.errors import DataError, UserError


def megatron_shard(prefix: Path, tokens: list[int], code: int = 8, dtype: str = "<u2") -> None:
    """One document of one sequence, as Megatron-LM writes it."""
    prefix.with_suffix(".bin").write_bytes(np.array(tokens, dtype).tobytes())
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 1, 2)
    prefix.with_suffix(".idx").write_bytes(header + struct.pack("<iqqq", len(tokens), 0, 0, 1))


@pytest.fixture
def foreign(tmp_path: Path, tokenizer_json: Path) -> Path:
    folder = tmp_path / "foreign"
    folder.mkdir()
    tokenizer = Tokenizer.load(tokenizer_json)
    megatron_shard(folder / "web_0_text", [*tokenizer.encode("def f1(x):"), tokenizer.eod_id])
    megatron_shard(folder / "web_1_text", [*tokenizer.encode("return x + 1"), tokenizer.eod_id])
    megatron_shard(folder / "web_valid", [*tokenizer.encode("x"), tokenizer.eod_id])
    return folder


def test_foreign_shards_become_a_prepared_folder(foreign: Path, tokenizer_json: Path) -> None:
    manifest = adopt(foreign, tokenizer_json)
    assert manifest == Manifest.load(foreign) == verify(foreign)
    assert [shard.name for shard in manifest.splits["train"]] == ["web_0_text", "web_1_text"]
    assert (manifest.documents("train"), manifest.documents("validation")) == (2, 1)
    source = TokenSource(foreign)
    assert Tokenizer.load(tokenizer_json).decode(source.tokens(0, len(source)).tolist()) == "def f1(x):return x + 1"


def test_text_bytes_of_short_shards_are_exact(foreign: Path, tokenizer_json: Path) -> None:
    manifest = adopt(foreign, tokenizer_json)
    assert manifest.text_bytes_estimated and manifest.text_bytes("train") == len("def f1(x):return x + 1")


def test_adopted_shards_get_checksums(foreign: Path, tokenizer_json: Path) -> None:
    adopt(foreign, tokenizer_json)
    assert len(list(foreign.glob("*.crc32"))) == 3


def test_a_shard_that_was_written_anew_is_told_from_a_damaged_one(foreign: Path, tokenizer_json: Path) -> None:
    adopt(foreign, tokenizer_json)
    tokens = np.random.default_rng(0).integers(0, 200, 10).tolist()
    megatron_shard(foreign / "web_1_text", tokens)
    with pytest.raises(DataError, match=r"web_1_text\.bin does not match web_1_text\.crc32: .*delete .* and repeat"):
        adopt(foreign, tokenizer_json)
    (foreign / "web_1_text.crc32").unlink()
    adopt(foreign, tokenizer_json)
    assert TokenSource(foreign).tokens(0, 99)[-10:].tolist() == tokens


def test_nothing_to_adopt(tmp_path: Path, tokenizer_json: Path) -> None:
    with pytest.raises(UserError, match=r"no \.idx files"):
        adopt(tmp_path, tokenizer_json)


def test_missing_tokenizer(foreign: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer = nowhere\.json: there is no such file"):
        adopt(foreign, "nowhere.json")


def test_mixed_dtypes_are_refused(foreign: Path, tokenizer_json: Path) -> None:
    megatron_shard(foreign / "web_2_text", [1, 2], code=4, dtype="<i4")
    with pytest.raises(UserError, match=r"several dtypes.*web_2_text\.idx: int32"):
        adopt(foreign, tokenizer_json)


def test_a_tokenizer_that_does_not_fit_leaves_the_folder_as_it_was(foreign: Path, tokenizer_json: Path) -> None:
    adopt(foreign, tokenizer_json)
    before = {path.name: path.read_bytes() for path in foreign.iterdir()}
    smaller = train(["another text"], 260, foreign.parent / "smaller.json")
    with pytest.raises(DataError, match=f"the vocabulary has {smaller.vocab_size} tokens"):
        adopt(foreign, foreign.parent / "smaller.json")
    assert {path.name: path.read_bytes() for path in foreign.iterdir()} == before
