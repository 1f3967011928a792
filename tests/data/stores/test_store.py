"""What is wrong with a URL or a store is said in one message that tells what to do."""

from __future__ import annotations

import resource
import shutil
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from argosy.config.data import CacheConfig
from argosy.data.stores import store as uploads
from argosy.data.stores.cache import Cache
from argosy.data.stores.folder import StoreFolder
from argosy.data.stores.store import Store, StoreUnreachable, is_url, upload, words
from argosy.errors import RunFailed, UserError
from object_store import KEYS, ObjectStore, Proxy, environment, needs_server


@pytest.mark.parametrize("place", ["s3://bucket/x", "s3:/bucket/x", "gs://b", "file:///data", "az://c/x"])
def test_urls_are_told_from_folders(place: str) -> None:
    assert is_url(place)
    assert not is_url("/data/s3/x")
    assert not is_url("data/x")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://host/x", "data cannot be read from ftp://. Use one of s3"),
        ("s3://key:secret@bucket/x", "it holds credentials"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        Store(url)
    assert "secret@" not in str(refused.value)


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31m"])
def test_an_object_whose_name_cannot_be_asked_for_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"file://.*: .*invalid path: .*Rename that object, or delete it"):
        Store(f"file://{tmp_path}").sizes()


def test_without_obstore_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(UserError, match=r"pip install 'argosy\[store\]'"):
        Store("s3://bucket/x")


def test_keys_in_the_file_of_aws_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from argosy.data.stores.store import keys_of_profile

    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = a\naws_secret_access_key = b%c\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    assert keys_of_profile() == {}
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert keys_of_profile() == {"access_key_id": "a", "secret_access_key": "b%c"}


def test_a_long_error_is_one_short_line() -> None:
    text = "Generic S3 error: Error performing GET http://h/x in 103.2ms, after 1 retries, max_retries: 1"
    assert words(OSError(f"{text}, retry_timeout: 30s  - HTTP error: error sending request\nmore")) == (
        "Generic S3 error: GET http://h/x: HTTP error: error sending request"
    )


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json"])
def test_of_an_object_without_end_only_what_it_may_have_is_read(
    name: str, tmp_path: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    shutil.copytree(prepared, tmp_path / "there")
    with (tmp_path / "there" / name).open("r+b") as file:
        file.truncate(3 * 2**30)  # most of it is a hole
    url = f"file://{tmp_path / 'there'}"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(Store(url).get(name, 2**20)) == 2**20 + 1
    monkeypatch.setattr("argosy.data.stores.folder.MOST_MANIFEST_BYTES", 2**20)
    with pytest.raises(UserError, match=rf"there/{name} has more than 1 MiB: it is not what its name says"):
        StoreFolder(url, Cache(CacheConfig(folder=str(tmp_path / "cache"))))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB
    assert not list((tmp_path / "cache").glob(f"folders/*/{name}"))


@needs_server
def test_an_outage_is_no_damage_whatever_the_names(tmp_path: Path) -> None:
    server = ObjectStore(tmp_path / "log")
    name = "train-00416.bin"
    try:
        with environment(server.endpoint):
            store = Store("s3://data/Range-416-NoSuchBucket")
            store.put(name, b"12345")
            assert store.get_range(name, 1, 3) == b"23"
            for start in (3, 10):
                with pytest.raises(FileNotFoundError, match=rf"{name}: has no bytes {start} to 20"):
                    store.get_range(name, start, 20)
    finally:
        server.stop()
    with environment(server.endpoint), pytest.raises(StoreUnreachable, match="error sending request"):
        Store("s3://data/Range-416-NoSuchBucket").get_range(name, 1, 3)


def test_bytes_behind_the_end_of_a_file_are_missing(tmp_path: Path) -> None:
    (tmp_path / "train-00000.bin").write_bytes(b"12345")
    with pytest.raises(FileNotFoundError, match="has no bytes 10 to 20"):
        Store(tmp_path.as_uri()).get_range("train-00000.bin", 10, 20)


def test_a_server_that_sends_no_parts_of_files_is_refused() -> None:
    class WholeFiles(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"12345")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), WholeFiles) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(UserError, match="Use a server that serves parts of files"):
            Store(f"http://127.0.0.1:{server.server_port}/web").get_range("train-00000.bin", 1, 3)
        server.shutdown()


@needs_server
def test_a_server_refuses_in_words(tmp_path: Path, prepared: Path) -> None:
    server = ObjectStore(tmp_path / "log", initial_requests=1)
    try:
        cache = Cache(CacheConfig(folder=str(tmp_path / "cache")))

        with environment(server.endpoint), pytest.raises(UserError, match="does not accept the") as bad:
            StoreFolder("s3://data/x", cache)
        assert KEYS["AWS_SECRET_ACCESS_KEY"] not in str(bad.value)
        said = pytest.raises(UserError, match=r"s3://data/x: no permission \(AccessDenied\). Give the account")
        with server.user_without_rights() as keys, environment(server.endpoint, **keys), said:
            StoreFolder("s3://data/x", cache)
    finally:
        server.stop()


@needs_server
def test_a_block_harmed_on_its_way_is_fetched_again_and_a_missing_bucket_named(tmp_path: Path, prepared: Path) -> None:
    from argosy.data.shards import TokenSource
    from argosy.data.stores.source import StoreSource

    server = ObjectStore(tmp_path / "log")
    proxy = Proxy(server.port)
    try:
        url = server.put(prepared, "web")
        cache = Cache(CacheConfig(folder=str(tmp_path / "cache")))
        with environment(proxy.endpoint):
            with pytest.raises(UserError, match="there is no such bucket"):
                StoreFolder("s3://nowhere/x", cache)
            source = StoreSource(StoreFolder(url, cache, check_shards=True))
            proxy.flips = 1
            assert (source.tokens(0, 5000) == TokenSource(prepared).tokens(0, 5000)).all()
            assert source.store_folder.news[0][0] == "block_damaged"
    finally:
        proxy.close()
        server.stop()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_copy_has_all_files_and_is_made_once(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (prepared / "chat_template.jinja").touch()
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

    monkeypatch.setattr(uploads, "STORE_PAUSE_S", 0.0)
    monkeypatch.setattr(uploads, "FILES_AT_ONCE", 1)
    monkeypatch.setattr(Store, "put", dies)
    with pytest.raises(RunFailed, match=r"remote = file://.*cannot be reached \(cut\)"):
        upload(prepared, url)
    assert "manifest.json" not in names(tmp_path / "there")

    def counts(store: Store, name: str, content: bytes | Path) -> None:
        written.append(name)
        put(store, name, content)

    monkeypatch.setattr(Store, "put", counts)
    (tmp_path / "there/train-00000.idx").unlink()
    assert upload(prepared, url)
    assert "train-00000.bin" not in written and "train-00000.idx" in written, "what is not there any more goes again"
    assert written[-1] == "manifest.json"
    assert names(tmp_path / "there") == names(prepared)


def test_other_data_are_not_written_over(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/manifest.json").write_text("{}")
    with pytest.raises(UserError, match="holds other prepared data"):
        upload(prepared, f"file://{tmp_path}/there")
    assert names(tmp_path / "there") == {"manifest.json"}
