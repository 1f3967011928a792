"""Requests and answers of OpenAI's API, as far as `argosy serve` has them: what comes in is checked, and what this
server would leave out of an answer is refused, not ignored.

The forms are those of the API reference of OpenAI (completions, chat completions, models, errors).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from argosy.inference.sampling import MOST_SEED, Finish, Sampling

MOST_CHOICES = 16
MOST_STOPS = 16
Stops = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MOST_STOPS)]
TokenIds = Annotated[list[int], Field(min_length=1)]


class ApiError(Exception):
    """An error as OpenAI's clients know it."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def to_record(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def _is_left_out(value: Any) -> Any:
    if value not in (None, 0, False, [], {}, "none"):
        raise ValueError("this server does not have it; leave it out")
    return value


LeftOut = Annotated[JsonValue, AfterValidator(_is_left_out)]
"""A key that changes answers in a way that is not to be had here: only a value that asks for nothing is taken."""


def _is_no_number(value: Any) -> Any:
    if type(value) is int:  # 0 too: it asks for the log-probabilities of the tokens that are written
        raise ValueError("this server does not have it; leave it out")
    return value


class StreamOptions(BaseModel):
    """Settings of a stream: what it tells beside the text."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class SamplingRequest(BaseModel):
    """The keys that completions of text and of conversations share."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: str | Stops | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: JsonValue = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    presence_penalty: LeftOut = None
    frequency_penalty: LeftOut = None
    logit_bias: LeftOut = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, said: Any) -> Any:
        return {key: value for key, value in said.items() if value is not None} if isinstance(said, dict) else said

    @model_validator(mode="after")
    def _stops_say_something(self) -> SamplingRequest:
        if self.stop == "":
            raise ValueError('stop = "": every text has the empty one in it; leave it out')
        return self

    def sampling(self, most: int | None, usual: int) -> Sampling:
        """Return the settings to draw with. most: the tokens that were asked for; usual: those if none were."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Sampling(
            max_tokens=most or usual,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=secrets.randbelow(2**32) if self.seed is None else self.seed % MOST_SEED,
            stop=stop,
        )


class CompletionRequest(SamplingRequest):
    """A request to continue texts."""

    prompt: str | Annotated[list[str], Field(min_length=1)] | TokenIds | Annotated[list[TokenIds], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    best_of: Literal[1] | None = None
    echo: LeftOut = None
    logprobs: Annotated[LeftOut, AfterValidator(_is_no_number)] = None
    suffix: LeftOut = None

    def prompts(self) -> list[str | list[int]]:
        """Return a prompt for each choice."""
        given: Any = self.prompt
        is_one = isinstance(given, str) or isinstance(given[0], int)
        return [each for each in ([given] if is_one else given) for _ in range(self.n or 1)]


class ChatRequest(SamplingRequest):
    """A request to answer a conversation. Messages are checked where the template reads them."""

    messages: Annotated[list[dict[str, JsonValue]], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    response_format: Mapping[Literal["type"], Literal["text"]] | None = None
    logprobs: LeftOut = None
    top_logprobs: LeftOut = None
    tools: LeftOut = None
    tool_choice: LeftOut = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    modalities: list[Literal["text"]] | None = None


@dataclass
class GrowingChoice:
    """One of the texts of an answer, as it grows."""

    text: str = ""
    tokens: int = 0
    finish: Finish = ""


class ApiAnswer:
    """An answer to one request, whole or in chunks."""

    def __init__(self, model: str, is_chat: bool, prompt_tokens: int):
        self._model, self._is_chat, self._prompt_tokens = model, is_chat, prompt_tokens
        self._id = ("chatcmpl-" if is_chat else "cmpl-") + secrets.token_hex(12)
        self._created = int(time.time())

    def whole(self, choices: Sequence[GrowingChoice]) -> dict[str, Any]:
        """Return the answer as one."""
        told = [
            {**self._said(number, choice), "logprobs": None, "finish_reason": choice.finish}
            for number, choice in enumerate(choices)
        ]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head(kind), "choices": told, "usage": self._usage(choices)}

    def _said(self, number: int, choice: GrowingChoice) -> dict[str, Any]:
        if self._is_chat:
            return {"index": number, "message": {"role": "assistant", "content": choice.text, "refusal": None}}
        return {"index": number, "text": choice.text}

    def begin(self, number: int) -> dict[str, Any] | None:
        """Return the first chunk of a choice, if there is one before its text."""
        return self._chunk(number, {"delta": {"role": "assistant", "content": ""}}, "") if self._is_chat else None

    def chunk(self, number: int, text: str, finish: Finish) -> dict[str, Any]:
        """Return a chunk with a part of a choice's text."""
        said: dict[str, Any] = {"delta": {"content": text} if text else {}} if self._is_chat else {"text": text}
        return self._chunk(number, said, finish)

    def end(self, choices: Sequence[GrowingChoice]) -> dict[str, Any]:
        """Return the last chunk of a stream that is to say its usage."""
        return {**self._head(self._chunk_kind), "choices": [], "usage": self._usage(choices)}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _chunk(self, number: int, said: dict[str, Any], finish: Finish) -> dict[str, Any]:
        choice = {"index": number, **said, "logprobs": None, "finish_reason": finish or None}
        return {**self._head(self._chunk_kind), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _usage(self, choices: Sequence[GrowingChoice]) -> dict[str, int]:
        written = sum(choice.tokens for choice in choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self._prompt_tokens + written,
        }
