"""A run's certificate: made once, by whoever is first; files that are none are refused."""

from __future__ import annotations

import builtins
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

from argosy.config.launch import LaunchConfig
from argosy.errors import UserError
from argosy.processes.tls import FOLDER, certificate_of, client_context, server_context


def test_all_who_ask_at_once_get_the_same(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(certificate_of, [tmp_path] * 8))
    assert len({one.certificate.read_bytes() for one in made}) == 1
    assert [file.name for file in tmp_path.iterdir()] == [FOLDER]
    assert made[0].key.stat().st_mode & 0o777 == 0o600
    assert made[0].context(is_server=True) and made[0].context(is_server=False)


def test_none_is_made_where_the_run_file_asks_for_none(tmp_path):
    assert server_context(tmp_path, LaunchConfig()) is None and client_context(tmp_path, LaunchConfig()) is None
    assert not list(tmp_path.iterdir())


def test_one_that_is_given_is_taken_and_none_is_made(tmp_path):
    given = certificate_of(tmp_path)
    launch = LaunchConfig(tls=True, tls_certificate=str(given.certificate), tls_key=str(given.key))
    other = tmp_path / "other"
    other.mkdir()
    assert server_context(other, launch) and not list(other.iterdir())


def test_files_that_are_no_certificate_are_named(tmp_path):
    (tmp_path / "x.pem").write_text("nothing")
    launch = LaunchConfig(tls=True, tls_certificate=str(tmp_path / "x.pem"), tls_key=str(tmp_path / "x.pem"))
    with pytest.raises(UserError, match=r"launch\.tls_certificate = .*x\.pem.*PEM"):
        server_context(tmp_path, launch)


def test_a_missing_package_is_named_with_the_extra_that_brings_it(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"argosy\[tls\]"):
        certificate_of(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_key_that_is_encrypted_is_refused_and_nobody_is_asked_for_its_password(tmp_path):
    made = certificate_of(tmp_path)
    key = serialization.load_pem_private_key(made.key.read_bytes(), None)
    made.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"a password"),
        )
    )
    launch = LaunchConfig(tls=True, tls_certificate=str(made.certificate), tls_key=str(made.key))
    with pytest.raises(UserError, match=r"launch\.tls_key = .*key\.pem.*not encrypted"):
        server_context(tmp_path, launch)
