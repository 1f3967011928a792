"""Credentials in URLs reach no message, event, manifest or run file, and other URLs are left as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.checkpoint.rank_writer import words
from argosy.checkpoint.remote import Remote
from argosy.config.data import PrepareConfig
from argosy.config.load import load
from argosy.config.schema import CheckpointConfig
from argosy.credentials import has_credentials, redact
from argosy.data.sources import find_files
from argosy.errors import ArgosyWarning, StorageError, UserError
from argosy.observe.events import Events

SECRET = "sEcr3t"
SECRETS = [
    f"s3://AKIAKEY:{SECRET}@bucket/folder",
    f"s3://AKIAKEY:abc/{SECRET}+x@bucket/folder",
    f"https://user:{SECRET}@host:8080/path",
    f"https://{SECRET}@host/path",
    f"ftp://user:{SECRET}@host",
    f"https://host/a.txt?X-Amz-Algorithm=x&X-Amz-Signature={SECRET}&X-Amz-Date=1",
    f"https://host/a.txt?X-Amz-Security-Token={SECRET}",
    f"https://storage.googleapis.com/b/o?GoogleAccessId=a&Signature={SECRET}",
    f"https://account.blob.core.windows.net/c/x?sv=2022&sig={SECRET}",
    f"abfs://container@account.dfs.core.windows.net/x?sig={SECRET}",
    f"abfss://user:{SECRET}@account/x",
    f"https://host/x?token={SECRET}",
    f"https://host/x#access_token={SECRET}",
    f"simplecache::s3://AKIAKEY:{SECRET}@bucket/x",
    f"zip://a.txt::https://user:{SECRET}@host/x.zip",
    f"s3:/AKIAKEY:{SECRET}@bucket",
    f"http://user:{SECRET}@[::1]:80/x",
    f"2-https://{SECRET}@host/path",
]
PLAIN = [
    "s3://bucket/argosy/run.v2/x@y",
    "abfs://container@account.dfs.core.windows.net/folder",
    "https://host:8080/a@b?page=2&version=3",
    "https://huggingface.co/datasets/a/b/resolve/main/x.parquet?download=true",
    "hf://datasets/owner/name@main/x.jsonl",
    "github://owner:repository@main/docs/*.md",
    "sftp://user@host/data",
    "file:///home/a:b@c/x",
    "memory://x",
    "zip://*.txt::https://host/a.zip",
    "http://[::1]:8080/x@y",
    "builtin:python",
    "C:/Users/x",
    "/home/user:name@host/x",
    "input = s3://bucket/x: there is no such file, try user:password@host",
]


@pytest.mark.parametrize("url", SECRETS)
def test_credentials_are_hidden_and_the_rest_is_left(url: str) -> None:
    said = redact(f'cannot read "{url}" now')
    assert SECRET not in said and "***" in said and said.startswith('cannot read "') and said.endswith('" now')
    assert has_credentials(url) and redact(redact(url)) == redact(url)


@pytest.mark.parametrize("text", PLAIN)
def test_other_urls_are_left_as_they_are(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize("url", SECRETS)
def test_a_run_file_with_credentials_is_refused_with_key_line_and_remedy(tmp_path: Path, url: str) -> None:
    path = tmp_path / "run.toml"
    for text in (f'remote = "{url}"', f'[checkpoint]\nremote = "{url}"', f'[data.prepare]\ninput = ["a.txt", "{url}"]'):
        path.write_text(text)
        with pytest.raises(UserError) as refused:
            load(path)
        assert SECRET not in str(refused.value)
        if text.startswith("["):
            assert "run.toml:2" in str(refused.value) and "fsspec/conf.json" in str(refused.value)
    with pytest.raises(UserError) as refused:
        load(None, {"checkpoint.remote": url})
    assert "checkpoint.remote: it holds credentials" in str(refused.value) and SECRET not in str(refused.value)


def test_the_message_says_how_that_key_s_credentials_are_given() -> None:
    url = f"https://me:{SECRET}@example.org"
    for key, way in {
        "alerts.webhook": "webhook_env",
        "wandb.url": "WANDB_API_KEY",
        "mlflow.tracking_uri": "MLFLOW_TRACKING_TOKEN",
        "opentelemetry.endpoint": "OTEL_EXPORTER_OTLP_HEADERS",
    }.items():
        with pytest.raises(UserError, match=rf"observe\.{key}: it holds credentials.* {way}(?!.*AWS_)"):
            load(None, {f"observe.{key}": url})


@pytest.mark.parametrize("url", SECRETS)
def test_who_calls_from_python_is_refused_as_well(tmp_path: Path, url: str) -> None:
    for refused in (
        lambda: find_files([url]),
        lambda: Remote(url, tmp_path),
        lambda: CheckpointConfig(remote=url),
        lambda: PrepareConfig(input=(url,)),
    ):
        with pytest.raises((UserError, ValueError), match="it holds credentials") as problem:
            refused()
        assert SECRET not in str(problem.value)


@pytest.mark.parametrize("url", SECRETS)
def test_what_a_library_says_is_hidden_in_errors_warnings_and_events(tmp_path: Path, url: str) -> None:
    problem = OSError(f"403 for {url}")  # after a redirection, say, or from fsspec's own configuration
    assert SECRET not in words(problem)
    assert SECRET not in str(StorageError(f"cannot be read ({problem})"))
    assert SECRET not in str(ArgosyWarning(f"cannot be read ({problem})"))
    Events(tmp_path, "rank-0").write("drain_failed", error=str(problem), more={"urls": [url]})
    assert SECRET not in (tmp_path / "events/rank-0.jsonl").read_text()


def test_a_long_text_without_a_url_is_looked_at_once() -> None:
    """It took a time that grew with the square of its length: minutes for what an error message may quote."""
    text = "a" * 1_000_000 + " and s3://bucket"
    assert redact(text) == text
