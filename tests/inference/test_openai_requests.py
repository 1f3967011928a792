"""Requests are checked key by key; answers have the forms of OpenAI's reference."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from argosy.inference.openai_requests import ApiAnswer, ApiError, ChatRequest, CompletionRequest, GrowingChoice

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hello"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"temperature": 2.1}, "less than or equal to 2"),
        ({"top_p": 0.0}, "greater than 0"),
        ({"n": 17}, "less than or equal to 16"),
        ({"stop": ""}, "every text has the empty one in it"),
        ({"stop": ["a", ""]}, "at least 1 character"),
        ({"best_of": 2}, "Input should be 1"),
        ({"logprobs": 0}, "this server does not have it; leave it out"),
        ({"logprobs": 3}, "this server does not have it; leave it out"),
        ({"logit_bias": {"5": 1}}, "this server does not have it; leave it out"),
        ({"max_tokens": "4"}, "valid integer"),
        ({"prompt": []}, "at least 1 item"),
        ({"unknown": 1}, "Extra inputs are not permitted"),
    ],
)
def test_what_it_does_not_do_is_refused(more, said):
    with pytest.raises(ValidationError) as refused:
        CompletionRequest.model_validate(TEXT | more)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": None},
        {"logit_bias": {}},
        {"tools": []},
        {"tool_choice": "none"},
        {"reasoning_effort": None},
        {"modalities": ["text"]},
        {"prompt_cache_key": "mine", "safety_identifier": "me", "service_tier": "auto"},
    ],
)
def test_a_key_that_asks_for_nothing_is_taken(more):
    assert ChatRequest.model_validate(CHAT | more).model == "m"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a", "a"]),
        (["a", "b"], ["a", "a", "b", "b"]),
        ([1, 2], [[1, 2], [1, 2]]),
        ([[1], [2]], [[1], [1], [2], [2]]),
    ],
)
def test_each_choice_has_its_prompt(prompt, prompts):
    assert CompletionRequest.model_validate({"model": "m", "prompt": prompt, "n": 2}).prompts() == prompts


def test_settings_that_are_left_out_are_those_of_the_reference():
    usual = CompletionRequest.model_validate(TEXT).sampling(None, 16)
    assert (usual.max_tokens, usual.temperature, usual.top_p, usual.stop) == (16, 1.0, 1.0, ())
    said = CompletionRequest.model_validate(TEXT | {"stop": "end", "seed": 3, "temperature": 0.0}).sampling(4, 16)
    assert (said.max_tokens, said.temperature, said.seed, said.stop) == (4, 0.0, 3, ("end",))
    for seed in (-1, 2**63 - 1):  # any number of 64 bits
        CompletionRequest.model_validate(TEXT | {"seed": seed}).sampling(None, 16).check()


@pytest.mark.parametrize(("is_chat", "kind"), [(True, "chat.completion"), (False, "text_completion")])
def test_an_answer_as_one(is_chat, kind):
    found = ApiAnswer("m", is_chat, 5).whole([GrowingChoice("hi", 2, "stop"), GrowingChoice("ho", 3, "length")])
    first = found["choices"][0]
    assert (found["object"], found["model"]) == (kind, "m")
    assert (first["message"]["content"] if is_chat else first["text"], first["finish_reason"]) == ("hi", "stop")
    assert found["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}


def test_an_answer_in_chunks():
    chat, text = ApiAnswer("m", True, 5), ApiAnswer("m", False, 5)
    assert text.begin(0) is None
    begun = chat.begin(1)
    assert begun is not None and begun["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chat.chunk(1, "hi", "")["choices"][0] == {
        "index": 1, "delta": {"content": "hi"}, "logprobs": None, "finish_reason": None,
    }  # fmt: skip
    assert chat.chunk(1, "", "stop")["choices"][0]["delta"] == {}
    assert text.chunk(0, "hi", "length")["choices"][0]["finish_reason"] == "length"
    last = chat.end([GrowingChoice("hi", 2, "stop")])
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2 and last["id"] == begun["id"]


@pytest.mark.parametrize(("status", "kind"), [(404, "invalid_request_error"), (503, "server_error")])
def test_an_error_has_its_kind(status, kind):
    record = ApiError(status, "no such model", "model_not_found", "model").to_record()["error"]
    assert record == {"message": "no such model", "type": kind, "param": "model", "code": "model_not_found"}
