"""A model's folder is the same wherever it is, and what is written is there whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import HfFileSystem

from argosy.data.stores import model_folder as module
from argosy.data.stores import store
from argosy.data.stores.model_folder import HUB, ModelFolder, model_folder, new_folder, read_beside
from argosy.errors import RunFailed, UserError
from hub import hub
from object_store import BUCKET, KEYS, ObjectStore, needs_server

FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 40, "inside/another": b"here"}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(params=["here", "file", "hub"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelFolder]:
    monkeypatch.setattr(module, "FILE_COPY_BYTES", 1000)
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    if request.param == "hub":
        with hub("team/model", FILES, "models") as address:
            monkeypatch.setattr("huggingface_hub.HfFileSystem", partial(HfFileSystem, endpoint=address))
            yield model_folder("hf://team/model")
    else:
        yield model_folder(f"file://{tmp_path}" if request.param == "file" else tmp_path)


def test_files_are_listed_and_read_range_by_range(folder: ModelFolder) -> None:
    assert set(folder.names()) - {"inside"} == {"config.json", "model.safetensors"}
    assert folder.content("inside/another", 10) == b"here"
    assert (folder.size("model.safetensors"), folder.size("other")) == (256 * 40, None)
    buffer = bytearray(5000)
    folder.read_into("model.safetensors", 77, memoryview(buffer))
    assert buffer == FILES["model.safetensors"][77:5077]
    assert folder.content("config.json", 10) == b"{}"
    with pytest.raises(UserError, match=r"model\.safetensors has more than"):
        folder.content("model.safetensors", 1000)
    with pytest.raises(UserError, match=r"other is not there"):
        folder.content("other", 1000)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("hf://model", "no model. Give hf://OWNER/NAME"),
        ("s3://key:secret@bucket/model", "s3://.*bucket/model"),
        ("ftp://host/model", "cannot be read from ftp://"),
    ],
)
def test_places_that_hold_no_models_are_refused(place: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        model_folder(place, "model.weights = ")
    assert "secret" not in str(raised.value) or place in str(raised.value)


def test_a_model_that_is_not_on_the_hub_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub("team/model", FILES, "models") as address:
        monkeypatch.setattr("huggingface_hub.HfFileSystem", partial(HfFileSystem, endpoint=address))
        with pytest.raises(UserError, match=r"model\.weights = hf://team/other: cannot be read \(.*Check the name"):
            model_folder("hf://team/other", "model.weights = ").names()


@pytest.mark.parametrize("url", ["", "file://"])
def test_a_folder_is_written_whole_or_not_at_all(url: str, tmp_path: Path) -> None:
    place = f"{url}{tmp_path}/out"
    if url:
        (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="half"), new_folder(place) as destination:
        with destination.file("a") as sink:
            sink.write(b"1" * 100)
        raise ValueError("half")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    with new_folder(place) as destination, destination.file("a") as sink:
        sink.write(memoryview(b"12"))
        sink.write(b"3")
    assert read_beside(place, ["a", "b"], 100) == {"a": b"123"}
    with pytest.raises(UserError, match="exists already"), new_folder(place):
        pass


def test_nothing_is_written_to_the_hub() -> None:
    with pytest.raises(UserError, match="hf upload"), new_folder(f"{HUB}team/model"):
        pass


@needs_server
@pytest.mark.slow
def test_a_store_of_s3s_protocol_holds_models_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ObjectStore(tmp_path / "log")
    monkeypatch.setattr(store, "STORE_PAUSE_S", 0.0)
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": server.endpoint}.items():
        monkeypatch.setenv(name, value)
    try:
        url = f"s3://{BUCKET}/models/one"
        large = bytes(range(256)) * 2**18  # 64 MiB: several parts
        with new_folder(url) as destination, destination.file("model.safetensors") as sink:
            sink.write(memoryview(large))
        folder = model_folder(url)
        assert folder.names() == ["model.safetensors"] and folder.size("model.safetensors") == len(large)
        buffer = bytearray(1000)
        folder.read_into("model.safetensors", len(large) - 1000, memoryview(buffer))
        assert buffer == large[-1000:]
    finally:
        server.stop()
    with pytest.raises(RunFailed, match="cannot be reached"):
        folder.read_into("model.safetensors", 0, memoryview(buffer))
