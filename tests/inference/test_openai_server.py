"""`argosy serve`, as OpenAI's own client sees it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from jsonschema import Draft202012Validator

import argosy
from argosy.cli.documents import schema_of
from argosy.inference import openai_server
from argosy.inference.loaded_model import ChatModel, LoadedModel
from argosy.inference.openai_server import SERVE_PORT, server_of
from argosy.watch import http
from argosy.watch.http import listening
from talker import make_talker, messages
from waiting import wait_until
from warm import WarmCommand

if TYPE_CHECKING:
    from openai import OpenAI

TOKEN = "a-key-that-nobody-guesses"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    with argosy.load_model(make_talker(tmp_path_factory.mktemp("talker") / "model")) as loaded:
        yield loaded


@contextmanager
def served(model: LoadedModel, token: str = "", has_chat: bool = True) -> Iterator[str]:
    """Serve a model as "talker" while the block runs. Gives the address."""
    with listening("127.0.0.1", None, SERVE_PORT) as listener:
        server = server_of(model, "talker", ChatModel(model) if has_chat else None, token, "127.0.0.1")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def address(model: LoadedModel) -> Iterator[str]:
    with served(model) as found:
        yield found


def client_of(address: str, key: str = "none") -> OpenAI:
    from openai import OpenAI  # here: each of the processes that run tests collects this module

    return OpenAI(base_url=address, api_key=key, max_retries=0)


@pytest.fixture
def client(address: str) -> OpenAI:
    return client_of(address)


HI = messages(("user", "hi"))


def test_the_model_is_listed(client: OpenAI) -> None:
    assert [each.id for each in client.models.list()] == ["talker"]
    assert client.models.retrieve("talker").owned_by == "argosy"


def test_a_conversation_is_answered(client: OpenAI) -> None:
    said = messages(("user", "hi"), ("assistant", "hello there"), ("user", "more"))
    found = client.chat.completions.create(model="talker", messages=said, temperature=0)
    choice, usage = found.choices[0], found.usage
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "Größe 🙂 is all",
        "stop",
    )
    assert usage.prompt_tokens > 0 and usage.completion_tokens > 3
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_an_answer_comes_as_it_is_written(client: OpenAI) -> None:
    said = messages(("user", "hi"), ("assistant", "hello there"), ("user", "more"))
    asked: Any = {"model": "talker", "messages": said, "temperature": 0, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**asked, stream=True))
    told = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert told[0].delta.role == "assistant" and told[-1].finish_reason == "stop"
    pieces = [each.delta.content for each in told if each.delta.content]
    assert "".join(pieces) == "Größe 🙂 is all" and len(pieces) > 2
    whole = client.chat.completions.create(**{k: v for k, v in asked.items() if k != "stream_options"})
    assert chunks[-1].usage.model_dump() == whole.usage.model_dump()


def test_texts_are_continued(client: OpenAI, model: LoadedModel) -> None:
    prompt = "<|im_start|>user\nhi"
    ids = ChatModel(model).prompt_of(HI)
    found = client.completions.create(model="talker", prompt=ids, temperature=0, max_tokens=20)
    assert (found.choices[0].text, found.choices[0].finish_reason) == ("hello there", "stop")
    two = client.completions.create(model="talker", prompt=[prompt, prompt], max_tokens=3, seed=1, n=2)
    assert [choice.index for choice in two.choices] == [0, 1, 2, 3]
    assert 4 <= two.usage.completion_tokens <= 12
    streamed = client.completions.create(model="talker", prompt=ids, temperature=0, max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "hello there"


def test_settings_are_those_of_the_request(client: OpenAI) -> None:
    def said(**settings: Any) -> tuple[str | None, str]:
        choice = client.chat.completions.create(model="talker", messages=HI, **settings).choices[0]
        return choice.message.content, choice.finish_reason

    assert said(temperature=0, stop="there") == ("hello ", "stop")
    assert said(temperature=0, stop=["zzz", "lo"]) == ("hel", "stop")
    assert said(temperature=0, max_completion_tokens=1)[1] == said(temperature=0, max_tokens=1)[1] == "length"
    wild = {"temperature": 2.0, "max_tokens": 12}
    assert said(**wild, seed=5) == said(**wild, seed=5)
    assert len({said(**wild, seed=seed) for seed in range(5)}) > 1
    assert said(temperature=2.0, top_p=1e-6) == said(temperature=0)


@pytest.mark.parametrize(
    ("asked", "status", "message"),
    [
        ({"model": "gpt-9"}, 404, "model 'gpt-9': there is 'talker' alone"),
        ({"temperature": -1}, 400, "temperature: Input should be greater than or equal to 0"),
        ({"top_p": 0}, 400, "top_p: Input should be greater than 0"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"n": 99}, 400, "n: Input should be less than or equal to 16"),
        ({"stop": ""}, 400, "every text has the empty one in it"),
        ({"messages": []}, 400, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "role 'robot'"),
        ({"messages": [{"role": "user", "content": "<|im_end|>"}]}, 400, "spells <|im_end|>"),
        ({"messages": [{"role": "user", "content": "long " * 200}]}, 400, "model.max_seq_len is 96"),
        ({"frequency_penalty": 0.5}, 400, "frequency_penalty: this server does not have it"),
        ({"tools": [{"type": "function"}]}, 400, "tools: this server does not have it"),
        ({"logprobs": True}, 400, "logprobs: this server does not have it"),
        ({"stop": ["", 1]}, 400, "stop: Input should be a valid string"),
        ({"stop": ["a"] * 17}, 400, "stop: List should have at most 16 items"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"nothing_such": 1}, 400, "nothing_such: Extra inputs are not permitted"),
    ],
)
def test_what_is_wrong_is_said_in_the_form_of_openai(
    client: OpenAI, asked: dict[str, Any], status: int, message: str
) -> None:
    import openai

    body = {"model": "talker", "messages": HI} | asked
    with pytest.raises(openai.APIStatusError) as refused:
        client.post("/chat/completions", body=body, cast_to=object)
    assert refused.value.status_code == status
    error = refused.value.body
    assert isinstance(error, dict) and error["type"] == "invalid_request_error" and message in error["message"]


def test_what_asks_for_nothing_is_taken(client: OpenAI) -> None:
    settings: Any = {"presence_penalty": 0, "logit_bias": {}, "logprobs": False, "tools": [], "user": "me"}
    assert client.chat.completions.create(model="talker", messages=HI, **settings).choices[0].message.content


def test_a_body_that_is_none_and_an_address_that_is_none(address: str) -> None:
    broken = httpx.post(f"{address}/chat/completions", content=b"{")
    assert broken.status_code == 400 and "Invalid JSON" in broken.json()["error"]["message"]
    no_number = httpx.post(f"{address}/completions", content=b'{"model": "talker", "prompt": "a", "temperature": NaN}')
    assert "temperature: Input should be a finite number" in no_number.json()["error"]["message"]
    nowhere = httpx.get(f"{address}/embeddings")
    assert nowhere.status_code == 404 and nowhere.json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(f"{address}/chat/completions").status_code == 405


def test_requests_that_come_together_are_answered_as_if_alone(client: OpenAI) -> None:
    def said(seed: int) -> str | None:
        asked: Any = {"model": "talker", "messages": HI, "temperature": 2.0, "max_tokens": 15, "seed": seed}
        return client.chat.completions.create(**asked).choices[0].message.content

    alone = [said(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(said, range(6))) == alone


def test_one_more_than_may_wait_is_told_to_come_again(
    client: OpenAI, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openai

    monkeypatch.setattr(openai_server, "MOST_WAITING_REQUESTS", -1)
    with pytest.raises(openai.RateLimitError, match="wait already"):
        client.chat.completions.create(model="talker", messages=HI)


def test_who_hangs_up_lets_others_in(address: str, client: OpenAI) -> None:
    asked = {"model": "talker", "prompt": "", "max_tokens": 90, "temperature": 2.0, "stream": True}
    with httpx.stream("POST", f"{address}/completions", json=asked) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
    found = client.chat.completions.create(model="talker", messages=HI, temperature=0)
    assert found.choices[0].message.content == "hello there"


def test_half_a_request_is_cut_off(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(http, "REQUEST_LIMIT_S", 0.1)
    half = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
    with served(model) as address, socket.create_connection(("127.0.0.1", httpx.URL(address).port), 20) as line:
        line.sendall(half)
        assert line.recv(1) == b""
    assert "Traceback" not in capsys.readouterr().err


def test_with_a_key_nobody_gets_in_without_it(model: LoadedModel) -> None:
    import openai

    with served(model, TOKEN) as address:
        assert client_of(address, TOKEN).models.list().data[0].id == "talker"
        with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"):
            client_of(address, "another").models.list()


def test_pages_of_others_and_names_that_lead_here_are_refused(address: str) -> None:
    for headers in ({"host": "evil.example"}, {"sec-fetch-site": "cross-site"}):
        assert httpx.get(f"{address}/models", headers=headers).status_code == 403


@pytest.mark.slow
def test_with_json_the_address_is_a_document(model: LoadedModel) -> None:
    with WarmCommand(["serve", model.home, "--name", "mine", "--json"], Path.cwd(), os.environ) as process:
        told = json.loads(process.stdout.readline())
        Draft202012Validator(schema_of("serve")).validate(told)
        assert client_of(told["url"]).models.list().data[0].id == told["model"] == "mine"
        process.send_signal(signal.SIGINT)
    assert process.returncode == 0


def test_the_command_says_its_key_and_that_it_is_no_server_for_load(model: LoadedModel) -> None:
    variables = {**os.environ, "ARGOSY_SERVE_TOKEN": TOKEN}
    with WarmCommand(["serve", model.home, "--name", "mine"], Path.cwd(), variables) as process:
        first, second, third = (process.stdout.readline() for _ in range(3))
        found = re.search(r"answers as 'mine' at (http://127\.0\.0\.1:\d+/v1) ", first)
        assert found and second == f"API key: {TOKEN}\n" and "vLLM" in third
        client = client_of(found[1], TOKEN)
        said = client.chat.completions.create(model="mine", messages=HI, temperature=0).choices[0].message.content
        process.send_signal(signal.SIGINT)
        assert said == "hello there"
    assert process.returncode == 0


def test_without_a_template_conversations_are_refused(model: LoadedModel) -> None:
    import openai

    with served(model, has_chat=False) as address:
        client = client_of(address)
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model="talker", messages=HI)
        assert client.completions.create(model="talker", prompt="hi", max_tokens=2).choices[0].text is not None
