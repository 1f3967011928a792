from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argosy.data.manifest import TOKENIZER, Manifest, verify
from argosy.errors import DataError, UserError
from data.conftest import MakeFolder, damage
from mutations import mutated

DOCUMENTS = [[1, 2, 3, 0], [4, 5, 0]]


@pytest.fixture
def folder(make_folder: MakeFolder) -> Path:
    return make_folder("a", train=[DOCUMENTS, [[6, 0]]], validation=[[[7, 0]]])


def test_counts_add_up_over_shards(folder: Path) -> None:
    manifest = Manifest.load(folder)
    assert (manifest.tokens("train"), manifest.documents("train"), manifest.text_bytes("train")) == (9, 3, 27)
    assert (manifest.tokens("validation"), manifest.documents("validation")) == (2, 1)


def test_missing_manifest_says_how_to_prepare(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"manifest\.json is missing.*argosy prepare TEXT --out"):
        Manifest.load(tmp_path)


def test_shards_without_manifest_are_recognised(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"interrupted.*--adopt"):
        Manifest.load(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "a-00000.bin", "a-00000.idx"])
@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_what_is_no_regular_file_is_refused_whatever_its_length(folder: Path, name: str, kind: str) -> None:
    path = folder / "manifest.json"
    record = json.loads(path.read_text())
    shard = record["splits"]["train"][0]
    for file in folder.glob(f"{shard['name']}.*"):
        file.write_bytes(b"")
    empty = hashlib.sha256().hexdigest()
    shard |= {"tokens": 0, "documents": 0, "idx_bytes": 0, "bin_sha256": empty, "idx_sha256": empty}
    path.write_text(json.dumps(record))
    replaced = folder / name.replace("a-00000", shard["name"])
    replaced.unlink()
    if kind == "pipe":
        os.mkfifo(replaced)
    else:
        replaced.symlink_to("/dev/zero")
    with pytest.raises(DataError, match=rf"{replaced.name} cannot be read \(not a regular"):
        verify(folder)


def test_a_manifest_that_cannot_be_read_is_refused(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()
    with pytest.raises(UserError, match=r"manifest\.json: cannot be read \(not a regular file\)"):
        Manifest.load(folder)
    with pytest.raises(UserError, match=r"manifest\.json: cannot be read \(File name too long\)"):
        Manifest.load(folder / ("a" * 300))


@pytest.mark.parametrize("content", ["{", '{"format": 2}', "[]"])
def test_damaged_manifest_is_refused(folder: Path, content: str) -> None:
    (folder / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=r"manifest\.json: .*damaged or of another version"):
        Manifest.load(folder)


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "a/b", "", ".", "..", "a\x00b", "a\nb", "x" * 300, "\u00e9" * 150]
)
def test_a_manifest_that_names_files_elsewhere_is_refused(folder: Path, name: str) -> None:
    path = folder / "manifest.json"
    record = json.loads(path.read_text())
    record["splits"]["train"][0]["name"] = name
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"manifest\.json: splits\.train\.0\.name: .* is not the name of a file"):
        Manifest.load(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [("eod_id", 10**6), ("vocab_size", 0), ("dtype", "object"), ("dtype", "float64"), ("tokenizer_sha256", "ab")],
)
def test_counts_and_kinds_that_cannot_be_are_refused(folder: Path, key: str, value: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(UserError, match=rf"manifest\.json: .*{key}"):
        Manifest.load(folder)


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_manifest_holds_it_is_read_or_refused_by_name(folder: Path, data: st.DataObject) -> None:
    path = folder / "manifest.json"
    whole = path.read_bytes()
    try:
        path.write_text(json.dumps(data.draw(mutated(json.loads(whole)))))
        Manifest.load(folder)
    except (UserError, DataError) as problem:
        assert str(folder) in str(problem) and len(str(problem)) < 800
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("name", ["train-00001.bin", "train-00000.idx", "validation-00000.bin"])
def test_truncated_or_missing_file_is_found_at_once(folder: Path, name: str) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=rf"{name} has \d+ bytes instead of \d+.*argosy prepare"):
        Manifest.load(folder)
    path.unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        Manifest.load(folder)


def test_manifest_of_another_tokenizer_is_refused(folder: Path) -> None:
    (folder / TOKENIZER).write_text("{}")
    with pytest.raises(UserError, match="manifest of another tokenizer"):
        Manifest.load(folder)
    (folder / TOKENIZER).unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"):
        Manifest.load(folder)


@pytest.mark.parametrize("name", ["train-00000.bin", "validation-00000.idx"])
def test_verify_finds_a_flipped_bit(folder: Path, name: str) -> None:
    assert verify(folder) == Manifest.load(folder)
    damage(folder / name, 3)
    with pytest.raises(DataError, match=f"{name} does not match its checksum"):
        verify(folder)


def test_verify_finds_checksums_of_other_bytes(folder: Path) -> None:
    """A run would take the shard for damaged."""
    damage(folder / "train-00000.crc32", 1)
    with pytest.raises(DataError, match=r"train-00000\.crc32 has other checksums than train-00000\.bin"):
        verify(folder)


def test_identity_follows_the_tokens_and_where_they_are_cut(make_folder: MakeFolder, folder: Path) -> None:
    first = Manifest.load(folder).identity
    same = make_folder("b", train=[DOCUMENTS, [[6, 0]]], validation=[[[7, 0]]])
    other = make_folder("c", train=[DOCUMENTS, [[8, 0]]], validation=[[[7, 0]]])
    swapped = make_folder("d", train=[[[6, 0]], DOCUMENTS], validation=[[[7, 0]]])
    assert Manifest.load(same).identity == first
    assert len({first, Manifest.load(other).identity, Manifest.load(swapped).identity}) == 3
