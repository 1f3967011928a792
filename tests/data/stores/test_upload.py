"""A copy in a store is whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.data.stores import upload as uploads
from argosy.data.stores.store import Store, StoreUnreachable
from argosy.data.stores.upload import upload
from argosy.errors import RunFailed, UserError


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_copy_has_all_files_and_is_made_once(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    url = f"file://{tmp_path}/there"
    assert upload(prepared, url)
    assert not upload(prepared, url)
    assert names(tmp_path / "there") == names(prepared)


def test_an_interrupted_copy_has_no_manifest_and_goes_on(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    url, put, written = f"file://{tmp_path}/there", Store.put, []

    def dies(store: Store, name: str, content: bytes | Path) -> None:
        if name.startswith("train-00001"):
            raise StoreUnreachable("cut")
        put(store, name, content)

    monkeypatch.setattr(uploads, "PAUSE_S", 0.0)
    monkeypatch.setattr(uploads, "AT_ONCE", 1)
    monkeypatch.setattr(Store, "put", dies)
    with pytest.raises(RunFailed, match=r"remote = file://.*cannot be reached \(cut\)"):
        upload(prepared, url)
    assert "manifest.json" not in names(tmp_path / "there")

    def counts(store: Store, name: str, content: bytes | Path) -> None:
        written.append(name)
        put(store, name, content)

    monkeypatch.setattr(Store, "put", counts)
    assert upload(prepared, url)
    assert "train-00000.bin" not in written
    assert written[-1] == "manifest.json"
    assert names(tmp_path / "there") == names(prepared)


def test_other_data_are_not_written_over(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/manifest.json").write_text("{}")
    with pytest.raises(UserError, match="holds other prepared data"):
        upload(prepared, f"file://{tmp_path}/there")
    assert names(tmp_path / "there") == {"manifest.json"}
