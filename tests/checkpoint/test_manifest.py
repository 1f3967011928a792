"""A checkpoint's manifest says what the checkpoint holds, and is refused if it was changed or is of another format."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.checkpoint.checksums import DamagedCheckpoint, FileSum, shard_name, signed
from argosy.checkpoint.history import History
from argosy.checkpoint.manifest import CheckpointManifest
from argosy.errors import UserError
from checkpoint.saving import manifest
from mutations import ODD_VALUES, mutated

WHOLE = manifest(
    7,
    tokens=700,
    skipped=((3, 5),),
    history=History(3, (("ab", 5), ("cd", 7)), "ef"),
    config_sha256="aa",
    files={shard_name(rank): FileSum(10 + rank, "ab" * 32) for rank in range(2)},
)


def test_all_of_a_manifest_comes_back(tmp_path):
    history = History(3, (("ab", 5), ("cd", 7)), "ef")
    given = manifest(
        7, plan="dp_replicate=2", skipped=((3, 5), (9, 10)), history=history, generation=4, config_sha256="aa"
    )
    assert CheckpointManifest.from_bytes(given.to_bytes(), "here") == given


def test_a_manifest_that_was_changed_is_damaged():
    data = manifest(7, tokens=700).to_bytes()
    with pytest.raises(DamagedCheckpoint, match=r"^here: does not match its own checksum"):
        CheckpointManifest.from_bytes(data.replace(b"700", b"800"), "here")


def test_a_manifest_of_another_format_is_refused_and_not_taken_for_damaged():
    data = signed(manifest(7).to_record() | {"format": 1})
    with pytest.raises(UserError, match=r"^here: format = 1, and this version reads checkpoints of format 2"):
        CheckpointManifest.from_bytes(data, "here")


def test_a_manifest_from_before_generations_were_called_so_is_read():
    # The name is of folders that the version before this one left, and stands nowhere else.
    before = {name: value for name, value in manifest(7, generation=4).to_record().items() if name != "generation"}
    data = signed(before | {"epoch": 4})
    assert (read := CheckpointManifest.from_bytes(data, "here")).generation == 4
    assert read.sha256 == hashlib.sha256(data).hexdigest()  # which verified.json names


@given(record=mutated(WHOLE.to_record()))
@settings(max_examples=400, deadline=None)
def test_whatever_is_in_a_signed_record_it_is_a_manifest_or_refused_by_name(record: Any) -> None:
    try:
        read = CheckpointManifest.from_bytes(signed(record), "runs/a/manifest.json")
    except (DamagedCheckpoint, UserError) as problem:
        assert str(problem).startswith("runs/a/manifest.json: ") and len(str(problem)) < 400
        return
    assert CheckpointManifest.from_bytes(read.to_bytes(), "here") == read
    assert set(read.files) == {shard_name(rank) for rank in range(len(read.files))}


@given(data=st.binary(max_size=200) | st.builds(lambda n: b"[" * n, st.integers(0, 200_000)))
@settings(max_examples=100, deadline=None)
def test_bytes_that_are_no_record_are_damaged(data: bytes) -> None:
    with pytest.raises(DamagedCheckpoint, match=r"^here: "):
        CheckpointManifest.from_bytes(data, "here")


@pytest.mark.parametrize("key", WHOLE.to_record())
@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: f"{type(value).__name__} {value!r:.12}")
def test_a_value_of_another_kind_is_named(key: str, value: Any) -> None:
    try:
        CheckpointManifest.from_bytes(signed({**WHOLE.to_record(), key: value}), "here")
    except UserError as problem:
        assert key in str(problem)


def test_a_key_that_is_missing_or_unknown_is_named() -> None:
    record = WHOLE.to_record()
    with pytest.raises(UserError, match=r"^here: tokens is missing"):
        CheckpointManifest.from_bytes(signed({k: v for k, v in record.items() if k != "tokens"}), "here")
    with pytest.raises(UserError, match=r"^here: 'color' is no key"):
        CheckpointManifest.from_bytes(signed({**record, "color": "red"}), "here")
