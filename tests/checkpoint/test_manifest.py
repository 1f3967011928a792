"""A checkpoint's manifest says what the checkpoint holds, and is refused if it was changed or is of another format."""

from __future__ import annotations

import hashlib

import pytest

from argosy.checkpoint.checksums import Damaged, signed
from argosy.checkpoint.history import History
from argosy.checkpoint.manifest import CheckpointManifest
from argosy.errors import UserError
from checkpoint.saving import manifest


def test_all_of_a_manifest_comes_back(tmp_path):
    history = History(3, (("ab", 5), ("cd", 7)), "ef")
    given = manifest(
        7, plan="dp_replicate=2", skipped=((3, 5), (9, 10)), history=history, generation=4, config_sha256="aa"
    )
    assert CheckpointManifest.from_bytes(given.to_bytes(), "here") == given


def test_a_manifest_that_was_changed_is_damaged():
    data = manifest(7, tokens=700).to_bytes()
    with pytest.raises(Damaged, match=r"^here: does not match its own checksum"):
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
