"""The run's secret: made once, by whoever is first, and refused where others could know it."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import given
from hypothesis import strategies as st

from argosy.config.launch import LaunchConfig
from argosy.errors import UserError
from argosy.processes.secret import (
    HELLO_MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    REFUSED_PROOF,
    SECRET_FILE,
    SECRET_FILE_VARIABLE,
    SECRET_VARIABLE,
    TLS_FOLDER,
    Handshake,
    HandshakeFailed,
    Keys,
    call,
    certificate_of,
    client_context,
    fingerprint_in,
    listen,
    secret_of,
    server_context,
)


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SECRET_VARIABLE, SECRET_FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_all_who_ask_at_once_get_the_same_and_nobody_else_can_read_it(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        found = set(pool.map(secret_of, [tmp_path] * 64))
    assert len(found) == 1 and len(found.pop()) == 64
    assert (tmp_path / SECRET_FILE).stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == [SECRET_FILE]


def test_two_runs_have_different_ones(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    assert secret_of(tmp_path / "a") != secret_of(tmp_path / "b")


def test_one_that_is_given_is_taken_and_none_is_written(tmp_path, monkeypatch):
    given = "s" * 32
    (tmp_path / "given").write_text(given + "\n")
    (tmp_path / "given").chmod(0o600)
    monkeypatch.setenv(SECRET_FILE_VARIABLE, str(tmp_path / "given"))
    assert secret_of(tmp_path) == given.encode()
    monkeypatch.setenv(SECRET_VARIABLE, "t" * 32)
    assert secret_of(tmp_path) == b"t" * 32 and not (tmp_path / SECRET_FILE).exists()


def test_a_file_that_others_may_read_is_refused(tmp_path):
    secret_of(tmp_path)
    (tmp_path / SECRET_FILE).chmod(0o644)
    with pytest.raises(UserError, match=r"mode 0644.*Try: chmod 600 .*\.secret"):
        secret_of(tmp_path)


def test_a_pipe_in_its_place_holds_nobody(tmp_path):
    os.mkfifo(tmp_path / SECRET_FILE, 0o600)
    assert fingerprint_in(tmp_path) == ""


def test_one_that_could_be_guessed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, "hunter2")
    with pytest.raises(UserError, match=r"ARGOSY_SECRET: .* fewer than 32 characters"):
        secret_of(tmp_path)


@pytest.mark.parametrize("content", [None, b"\xff\xfe" * 40], ids=["missing", "no text"])
def test_one_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None):
    path = tmp_path / "given"
    if content is not None:
        os.close(os.open(path, os.O_CREAT, 0o600))
        path.write_bytes(content)
    monkeypatch.setenv(SECRET_FILE_VARIABLE, str(path))
    with pytest.raises(UserError, match=r"ARGOSY_SECRET_FILE = .*given: .* cannot be read"):
        secret_of(tmp_path)


def test_a_folder_that_takes_none_is_named(tmp_path):
    with pytest.raises(UserError, match=r"\.secret: .* cannot be kept there .* set ARGOSY_SECRET_FILE"):
        secret_of(tmp_path / "missing")


SECRET, OTHER = b"s" * 32, b"o" * 32


def begin(handshake: Handshake) -> bytes:
    """What it sends first."""
    sent, _ = next(handshake)
    return sent


def end(handshake: Handshake, received: bytes) -> tuple[bytes, Keys | None]:
    """What it sends last, and its keys, if there are any."""
    sent, wanted = handshake.send(received)
    if wanted:
        return sent, None
    with pytest.raises(StopIteration) as done:
        next(handshake)
    return sent, done.value.value


def talk(callers: bytes, listeners: bytes) -> tuple[Keys, Keys]:
    caller, listener = call(callers), listen(listeners)
    greeting, _ = begin(listener), begin(caller)
    answer, _ = end(caller, greeting)
    proof, theirs = end(listener, answer)
    with pytest.raises(StopIteration) as done:
        caller.send(proof)
    assert theirs is not None
    return done.value.value, theirs


def test_both_ends_have_the_same_keys_which_differ_by_direction_and_connection():
    caller, listener = talk(SECRET, SECRET)
    assert (caller.sending, caller.receiving) == (listener.receiving, listener.sending)
    assert caller.sending != caller.receiving
    assert talk(SECRET, SECRET)[0] != caller


def test_a_caller_with_another_secret_is_refused_and_learns_no_proof():
    caller, listener = call(OTHER), listen(SECRET)
    greeting, _ = begin(listener), begin(caller)
    answer, _ = end(caller, greeting)
    assert listener.send(answer) == (REFUSED_PROOF, 0)
    with pytest.raises(HandshakeFailed):
        next(listener)
    with pytest.raises(HandshakeFailed):
        caller.send(REFUSED_PROOF)


def test_a_listener_that_does_not_know_the_secret_is_found_out():
    caller = call(SECRET)
    begin(caller)
    end(caller, HELLO_MAGIC + bytes(NONCE_BYTES))
    with pytest.raises(HandshakeFailed, match="does not know"):
        caller.send(bytes(PROOF_BYTES))


def test_what_was_recorded_from_another_conversation_is_refused():
    caller, listener = call(SECRET), listen(SECRET)
    greeting, _ = begin(listener), begin(caller)
    recorded, _ = end(caller, greeting)
    again = listen(SECRET)
    begin(again)
    assert again.send(recorded)[0] == REFUSED_PROOF


def test_a_proof_that_is_sent_back_to_its_author_is_refused():
    """An impostor has no secret: it asks the caller to answer the caller's own challenge, in another connection."""
    first, second = call(SECRET), call(SECRET)
    begin(first), begin(second)
    nonce = bytes(range(NONCE_BYTES))
    answer, _ = end(first, HELLO_MAGIC + nonce)
    other, _ = end(second, HELLO_MAGIC + answer[:NONCE_BYTES])
    for proof in (answer[NONCE_BYTES:], other[NONCE_BYTES:]):
        victim = call(SECRET)
        begin(victim)
        end(victim, HELLO_MAGIC + nonce)
        with pytest.raises(HandshakeFailed):
            victim.send(proof)


@given(answer=st.binary(min_size=NONCE_BYTES + PROOF_BYTES, max_size=NONCE_BYTES + PROOF_BYTES))
def test_no_made_up_answer_passes(answer):
    listener = listen(SECRET)
    begin(listener)
    assert listener.send(answer)[0] == REFUSED_PROOF


def test_another_program_is_named_as_such():
    caller = call(SECRET)
    begin(caller)
    with pytest.raises(HandshakeFailed, match="not argosy"):
        caller.send(b"HTTP/1.1 400 Bad Request\r\n".ljust(len(HELLO_MAGIC) + NONCE_BYTES))


def test_all_who_ask_at_once_get_the_same(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(certificate_of, [tmp_path] * 8))
    assert len({one.certificate.read_bytes() for one in made}) == 1
    assert [file.name for file in tmp_path.iterdir()] == [TLS_FOLDER]
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
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ec", None)
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
