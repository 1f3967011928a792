"""A peer that knows the secret passes; one that does not, or repeats what others said, does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.processes.handshake import MAGIC, NONCE_BYTES, PROOF_BYTES, REFUSED, Handshake, Keys, Stranger, call, listen

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
    assert listener.send(answer) == (REFUSED, 0)
    with pytest.raises(Stranger):
        next(listener)
    with pytest.raises(Stranger):
        caller.send(REFUSED)


def test_a_listener_that_does_not_know_the_secret_is_found_out():
    caller = call(SECRET)
    begin(caller)
    end(caller, MAGIC + bytes(NONCE_BYTES))
    with pytest.raises(Stranger, match="does not know"):
        caller.send(bytes(PROOF_BYTES))


def test_what_was_recorded_from_another_conversation_is_refused():
    caller, listener = call(SECRET), listen(SECRET)
    greeting, _ = begin(listener), begin(caller)
    recorded, _ = end(caller, greeting)
    again = listen(SECRET)
    begin(again)
    assert again.send(recorded)[0] == REFUSED


def test_a_proof_that_is_sent_back_to_its_author_is_refused():
    """An impostor has no secret: it asks the caller to answer the caller's own challenge, in another connection."""
    first, second = call(SECRET), call(SECRET)
    begin(first), begin(second)
    nonce = bytes(range(NONCE_BYTES))
    answer, _ = end(first, MAGIC + nonce)
    other, _ = end(second, MAGIC + answer[:NONCE_BYTES])
    for proof in (answer[NONCE_BYTES:], other[NONCE_BYTES:]):
        victim = call(SECRET)
        begin(victim)
        end(victim, MAGIC + nonce)
        with pytest.raises(Stranger):
            victim.send(proof)


@given(answer=st.binary(min_size=NONCE_BYTES + PROOF_BYTES, max_size=NONCE_BYTES + PROOF_BYTES))
def test_no_made_up_answer_passes(answer):
    listener = listen(SECRET)
    begin(listener)
    assert listener.send(answer)[0] == REFUSED


def test_another_program_is_named_as_such():
    caller = call(SECRET)
    begin(caller)
    with pytest.raises(Stranger, match="not argosy"):
        caller.send(b"HTTP/1.1 400 Bad Request\r\n".ljust(len(MAGIC) + NONCE_BYTES))
