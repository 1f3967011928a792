"""Conversations out of records: the forms that data sets have, checked, as lists of messages.

{"messages": [{"role": "user", "content": ...}, ...], "tools": [...]}      also "conversations", from/value, "system"
{"prompt": ..., "completion": ...}                                        text, or lists of messages
{"prompt": ..., "chosen": ..., "rejected": ...}                           or two whole conversations
{"prompt": ..., "completion": ..., "label": true}                         an answer that was judged
{"instruction": ..., "input": ..., "output": ..., "history": [...]}       of Alpaca, with what LLaMA-Factory adds
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from argosy.errors import a_kind
from argosy.files import json_of

Message = dict[str, Any]
Record = dict[str, Any]

NO_CONVERSATION = "no conversation"
ROLES = "roles in a wrong order"
NO_ANSWER = "empty answer"
EQUAL_SIDES = "pair with equal sides"
IMAGES = "images"

ROLE_NAMES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bard", "model", "bot", "function_call"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "ipython"), "tool"),
}
"""A data set's name of a role -> its name in chat templates."""


REASONING = ("reasoning_content", "thinking", "reasoning")
"""A message's fields that may hold its reasoning; templates read the first, gpt-oss's the second."""
LEARNED = ("weight", "train", "training")
"""Fields of an answer of which each may say that it is not learned: OpenAI's, and axolotl's."""


class BadRecord(Exception):
    """A record that no conversation can be made of."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind, self.detail = kind, detail


@dataclass(frozen=True)
class Conversation:
    """Messages that end with an answer."""

    messages: list[Message]
    tools: list[Any] | None = None
    prompt: int = 0
    """Number of first messages that are no part of what is learned, whatever their role."""
    is_rejected: bool = False
    """The rejected side of a pair, or an answer that was judged undesirable."""


def conversations_of(record: Record, objective: str) -> list[Conversation]:
    """Return the conversation of a record; of a preference pair both, the chosen one first. Raises: BadRecord."""
    record = _of_alpaca(record)
    tools = record.get("tools") or None
    if isinstance(tools, str):
        tools = _parsed(tools, "tools")
    if tools is not None and not isinstance(tools, list):
        raise BadRecord(NO_CONVERSATION, f"tools holds {a_kind(tools)}; it must be a list of tools")
    if objective == "sft":
        found = [_one(record, tools)]
    else:
        found = [_judged(record, tools)] if objective == "kto" else _pair(record, tools)
    if not (system := _text(record.get("system"), "system")).strip() or found[0].messages[0]["role"] == "system":
        return found
    first: Message = {"role": "system", "content": system}
    return [replace(each, messages=[first, *each.messages], prompt=each.prompt + 1) for each in found]


def _of_alpaca(record: Record) -> Record:
    """Return a record of LLaMA-Factory's forms as one of the others."""
    if isinstance(record.get("kto_tag"), bool):
        record = {"label": record["kto_tag"], **record}
    asked = [text for name in ("instruction", "input") if (text := _text(record.get(name), name))]
    if not asked or record.get("messages") is not None or record.get("prompt") is not None:
        return record
    turns = record.get("history") or []
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        raise BadRecord(NO_CONVERSATION, f"history holds {a_kind(turns)}, not pairs of a question and its answer")
    roles = ("user", "assistant")
    before = [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]
    prompt = [*before, {"role": "user", "content": "\n".join(asked)}]
    output = record.get("output")
    if isinstance(output, list) and len(output) == 2:  # the chosen one first
        record = {**record, "chosen": output[0], "rejected": output[1]}
    if record.get("chosen") is not None:
        return {**record, "prompt": prompt}
    return {**record, "messages": [*prompt, {"role": "assistant", "content": output}]}


def _one(record: Record, tools: list[Any] | None) -> Conversation:
    for name in ("messages", "conversations", "conversation"):
        if record.get(name) is not None:  # a table has a column for each form that one of its rows has
            return _whole(messages_of(record[name], name), tools, 0, name)
    if record.get("prompt") is not None and record.get("completion") is not None:
        prompt = _side(record["prompt"], "prompt", "user")
        whole = prompt + _side(record["completion"], "completion", "assistant")
        return _whole(whole, tools, len(prompt), "completion")
    raise BadRecord(
        NO_CONVERSATION,
        f"no messages, conversations, prompt and completion, or instruction and output; it has {names_in(record)}",
    )


def _judged(record: Record, tools: list[Any] | None) -> Conversation:
    label = record.get("label")
    if not isinstance(label, bool):
        raise BadRecord(NO_CONVERSATION, f"label must be true or false, and the record has {names_in(record)}")
    one = _one(record, tools)
    prompt = one.prompt or len(one.messages) - 1  # of whole messages, the last answer was judged
    return Conversation(one.messages, tools, prompt, not label)


def _pair(record: Record, tools: list[Any] | None) -> list[Conversation]:
    if record.get("chosen") is None or record.get("rejected") is None:
        raise BadRecord(NO_CONVERSATION, f"no chosen and rejected; it has {names_in(record)}")
    before = record.get("prompt")
    if not before and isinstance(record["chosen"], dict):  # LLaMA-Factory's: one message a side
        before = record.get("conversations")
    prompt = _side(before, "prompt", "user") if before else []
    sides = [_side(record[name], name, "assistant" if prompt else "") for name in ("chosen", "rejected")]
    if prompt and all(side[: len(prompt)] == prompt for side in sides):
        sides = [side[len(prompt) :] for side in sides]  # whole conversations, beside their prompt
    shared = list(prompt)
    if not prompt:
        while min(map(len, sides)) > 1 and sides[0][0] == sides[1][0]:
            shared.append(sides[0][0])
            sides = [side[1:] for side in sides]
    if sides[0] == sides[1]:
        raise BadRecord(EQUAL_SIDES, "chosen and rejected are the same")
    named = zip(sides, ("chosen", "rejected"), strict=True)
    chosen, rejected = (_whole(shared + side, tools, len(shared), name) for side, name in named)
    return [chosen, Conversation(rejected.messages, tools, rejected.prompt, True)]


def _side(value: Any, name: str, role: str) -> list[Message]:
    if isinstance(value, str):
        if not role:
            raise BadRecord(NO_CONVERSATION, f"{name} is text without a prompt; give prompt, or lists of messages")
        return messages_of([{"role": role, "content": value}], name)
    return messages_of([value] if isinstance(value, dict) else value, name)


def messages_of(value: Any, name: str, may_say_nothing: bool = False) -> list[Message]:
    """Return a list of messages as templates see them. may_say_nothing: of answers. Raises: BadRecord."""
    if isinstance(value, str):
        value = _parsed(value, name)
    if not isinstance(value, list) or not value:
        raise BadRecord(NO_CONVERSATION, f"{name} holds no list of messages")
    return [_message(message, f"{name}[{number}]", may_say_nothing) for number, message in enumerate(value)]


def _message(given: Any, where: str, may_say_nothing: bool) -> Message:
    if not isinstance(given, dict):
        raise BadRecord(NO_CONVERSATION, f"{where} is {a_kind(given)}, not a message")
    given = {key: value for key, value in given.items() if value is not None}
    said = given.get("role", given.get("from"))
    role = ROLE_NAMES.get(said) if isinstance(said, str) else None
    if role is None:
        raise BadRecord(ROLES, f"{where} has the role {str(said)[:40]!r}; it must be user, assistant, system or tool")
    weights = {key: given[key] for key in LEARNED if role == "assistant" and key in given}
    for key, value in weights.items():
        if value not in (0, 1):
            raise BadRecord(NO_CONVERSATION, f"{where} has {key} = {str(value)[:40]!r}; it must be 0 or 1")
    message = {key: value for key, value in given.items() if key not in ("from", "value")}
    if said == "function_call":  # LLaMA-Factory's: calls as JSON
        calls = _parsed(_text(given.get("content", given.get("value")), where), where)
        functions = [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]
        given = message = {"tool_calls": functions}
    if (reasoning := next((given[key] for key in REASONING if key in given), None)) is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}  # as transformers does
    content = _text(given.get("content", given.get("value")), where)
    if role == "assistant" and not may_say_nothing and not content.strip() and not given.get("tool_calls"):
        raise BadRecord(NO_ANSWER, f"{where} says nothing")
    return {**message, "role": role, "content": content, **({} if all(weights.values()) else {"weight": 0})}


def _text(content: Any, where: str) -> str:
    """Return what a message says; of parts of text, all of them."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else []
    kinds = {str(part.get("type")) for part in parts if isinstance(part, dict)}
    if kinds - {"text"}:
        kind = sorted(kinds - {"text"})[0][:40]
        raise BadRecord(IMAGES, f"{where} has a part of type {kind!r}; models here read text alone")
    if not parts or not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise BadRecord(NO_CONVERSATION, f"{where} says {a_kind(content)}, not text")
    return "".join(part["text"] for part in parts)


def _whole(messages: list[Message], tools: list[Any] | None, prompt: int, name: str) -> Conversation:
    """Return the conversation up to its last answer, if each message may follow the one before. Raises: BadRecord."""
    may_follow = {"": ("system", "user"), "system": ("user",), "user": ("assistant",)}
    may_follow |= {"assistant": ("user", "tool"), "tool": ("tool", "assistant")}
    before = ""
    for number, message in enumerate(messages):
        role = message["role"]
        if role not in may_follow[before]:
            raise BadRecord(ROLES, f"{name}: message {number} is of the {role}, after {before or 'nothing'}")
        before = role
    while messages and messages[-1]["role"] != "assistant":
        messages = messages[:-1]  # nothing follows it that could be learned
    if not any(message["role"] == "assistant" for message in messages[prompt:]):
        raise BadRecord(NO_ANSWER, f"{name} has no answer")
    return Conversation(messages, tools, prompt)


def _parsed(text: str, name: str) -> Any:
    try:
        return json_of(text)
    except ValueError:
        raise BadRecord(NO_CONVERSATION, f"{name} is text, and no JSON") from None


def without_nulls(value: Any) -> Any:
    """Return a row's value without nulls: a column has each field that any of its rows has, arguments of calls too."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def names_in(record: Record) -> str:
    """Return the names of a record's fields, a bounded part of them."""
    names = ", ".join(repr(name[:40]) for name in list(record)[:10]) or "nothing"
    return f"{names}, ..." if len(record) > 10 else names
