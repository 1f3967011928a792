"""A model's chat template: renders conversations as text, as transformers does, and finds the answers in it.

The answers are what the template marks by `{% generation %}`. Most templates mark nothing; then an answer is what a
conversation has more than its prompt: the text up to and with message i, less the text up to message i with the
opening of an answer after it. That is checked: each must be the beginning of the next, and the difference must hold
what the message says. A conversation in which either way does not find all answers is refused.

A template comes with a model from somewhere, so it runs in jinja2's sandbox, sees plain JSON and nothing else.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from argosy.data.conversations import BadRecord, Conversation, Message
from argosy.data.manifest import TEMPLATE, TOKENIZER
from argosy.data.tokenizer import MOST_TOKENIZER_BYTES, Tokenizer, tokenizer_file
from argosy.errors import UserError
from argosy.files import expanded, read_at_most

TOKENIZER_CONFIG, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
"""Files beside a tokenizer.json: its settings, which may have a chat template, and its special tokens."""
UNSHOWN_ANSWERS = "answers that the template does not show"
REFUSED_BY_TEMPLATE = "conversation that the template refuses"
BEGIN_ANSWER, END_ANSWER = "\ufdd0", "\ufdd1"
"""Marks of an answer in rendered text: two of Unicode's noncharacters, which no text has."""
SOME_ANSWER = "\ufdd2"
"""Stands for an answer where the template is asked how one ends: another noncharacter."""
END_OF_REASONING = "</think>"
"""The mark that models write between their reasoning and the answer."""
TODAY = date(2024, 7, 26)
"""The date that templates see, so that the same data come out on any day: the one that Llama 3.1's falls back to."""

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else -%}
{{ message['content'] + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
BUILT_IN = {"chatml": CHATML}
"""Templates for tokenizers that have none, by name."""


@dataclass(frozen=True)
class RenderedConversation:
    """A conversation as text."""

    text: str
    answers: list[tuple[int, int]]
    """Start and end of each answer that is learned, in characters."""
    cuts: list[int]
    """Places where the text may end: after each answer, as far as the template tells."""


class ChatTemplate:
    """A compiled template.

    Args:
        text: jinja2.
        special: names of special tokens, such as bos_token -> their text.
        where: the file, for messages.
    """

    def __init__(self, text: str, special: dict[str, str], where: str):
        import jinja2

        self.special = special
        self.text = text
        try:
            self._template = _environment().from_string(text)
        except jinja2.TemplateError as error:
            raise UserError(f"{where}: not a chat template ({error}). Restore it, or give another.") from None
        self.marks_answers = "generation" in text and BEGIN_ANSWER in self._try_marks()

    def _try_marks(self) -> str:
        try:
            return self._text([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], None)
        except BadRecord:
            return ""

    def render(self, messages: list[Message], tools: list[Any] | None = None, opens_answer: bool = False) -> str:
        """Return the text of messages; opens_answer: with the opening of an answer after it. Raises: BadRecord."""
        return self._text(messages, tools, opens_answer).replace(BEGIN_ANSWER, "").replace(END_ANSWER, "")

    def spellings(self) -> str:
        """Return the template and short conversations in it: what it writes by itself is in one of them."""
        said = [{"role": role, "content": "a"} for role in ("system", "user", "assistant")]
        found = [self.text]
        for messages in (said, said[1:]):
            with suppress(BadRecord):  # some have no system message
                found.append(self.render(messages, opens_answer=True))
        return "\n".join(found)

    def turn_end(self, special: Collection[str]) -> str:
        """Return the text that ends an answer; empty if nothing follows one. special: tokens. Raises: BadRecord."""
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": SOME_ANSWER}]
        tail = self.render(said).rpartition(SOME_ANSWER)[2].strip()
        first = [token for token in special if tail.startswith(token)]
        return max(first, key=len, default=tail.partition("\n")[0])

    def conversation(self, conversation: Conversation, needs_cuts: Callable[[str], bool]) -> RenderedConversation:
        """Return the text of a conversation and its answers. Raises: BadRecord if they are not found.

        needs_cuts(text): True if the text may have to be cut.
        """
        messages, tools = conversation.messages, conversation.tools
        if any(mark in json.dumps(messages, ensure_ascii=False, default=str) for mark in (BEGIN_ANSWER, END_ANSWER)):
            raise BadRecord(UNSHOWN_ANSWERS, "a message holds the characters U+FDD0 or U+FDD1")
        marked = self._text(messages, tools)
        text = marked.replace(BEGIN_ANSWER, "").replace(END_ANSWER, "")
        numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        found = _marked(marked) if self.marks_answers else self._by_prefixes(text, messages, tools, numbers)
        if len(found) < len(numbers):
            raise BadRecord(
                UNSHOWN_ANSWERS, f"the chat template marks {len(found)} answers, and there are {len(numbers)}"
            )
        places = [[place] for place in found]
        if len(found) > len(numbers):  # a message's reasoning, text and calls, or the end of all, are marked apart
            openings = [self.render(messages[:number], tools, opens_answer=True) for number in numbers]
            begins = [_same_letters(opening, text) for opening in openings]
            at = [max(0, bisect_right(begins, begin) - 1) for begin, _ in found]
            places = [[place for place, i in zip(found, at, strict=True) if i == k] for k in range(len(numbers))]
        for number, parts in zip(numbers, places, strict=True):
            if not _is_shown(messages[number], "".join(text[begin:end] for begin, end in parts)):
                raise BadRecord(
                    UNSHOWN_ANSWERS, f"the chat template does not show where the answer in message {number} is"
                )
        learned = [
            place
            for number, parts in zip(numbers, places, strict=True)
            if number >= conversation.prompt and messages[number].get("weight", 1) != 0
            for place in parts
        ]
        if not learned:
            raise BadRecord(UNSHOWN_ANSWERS, "no answer is to be learned: each has weight 0")
        cuts = self._cuts(text, messages, tools, numbers) if needs_cuts(text) else []
        return RenderedConversation(text, learned, cuts)

    def _by_prefixes(
        self, text: str, messages: list[Message], tools: list[Any] | None, numbers: list[int]
    ) -> list[tuple[int, int]]:
        found = []
        for number in numbers:
            prompt = self.render(messages[:number], tools, opens_answer=True)
            whole = self._up_to(number, text, messages, tools)
            if not whole.startswith(prompt) or not text.startswith(whole):
                raise BadRecord(
                    UNSHOWN_ANSWERS,
                    f"the chat template writes message {number} in another way when others follow; mark answers in it "
                    "by {% generation %} ... {% endgeneration %}",
                )
            end = len(whole)
            said = whole[len(prompt) :]
            kept = said.rstrip()  # a line's end after the token that ends a turn is the template's
            if len(kept) > len(messages[number]["content"].strip()) and kept.endswith((">", "]", "|")):
                end = len(prompt) + len(kept)
            found.append((len(prompt), end))
        return found

    def _cuts(self, text: str, messages: list[Message], tools: list[Any] | None, numbers: list[int]) -> list[int]:
        ends = [self._up_to(number, text, messages, tools) for number in numbers]
        return [len(end) for end in ends if text.startswith(end)]

    def _up_to(self, number: int, text: str, messages: list[Message], tools: list[Any] | None) -> str:
        """Return the text of the messages up to one, without what ends all text if others follow (Phi-3's)."""
        whole = self.render(messages[: number + 1], tools)
        return whole if text.startswith(whole) else whole.removesuffix(self.special.get("eos_token", ""))

    def _text(self, messages: list[Message], tools: list[Any] | None, opens_answer: bool = False) -> str:
        parsed = [_with_parsed_calls(message) for message in messages]
        if parsed != messages:
            with suppress(BadRecord):  # DeepSeek's asks for text
                return self._rendered(parsed, tools, opens_answer)
        return self._rendered(messages, tools, opens_answer)

    def _rendered(self, messages: list[Message], tools: list[Any] | None, opens_answer: bool) -> str:
        import jinja2

        try:
            return self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=opens_answer, **self.special
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            raise BadRecord(REFUSED_BY_TEMPLATE, f"the chat template: {error}") from None

    @classmethod
    def load(cls, folder: Path, given: str = "", key: str = "`chat_template`") -> ChatTemplate:
        """Load the template beside the tokenizer.json of `folder`, or the file or built-in one that `given` names.

        key: the setting that gives it, in messages.
        Raises: UserError if there is none.
        """
        beside = tokenizer_file(folder).parent
        settings = _json(beside / TOKENIZER_CONFIG)
        names = {**_json(beside / SPECIAL), **settings}
        special = {name: token for name, value in names.items() if name.endswith("_token") and (token := _token(value))}

        def made(text: str, where: str) -> ChatTemplate:
            if "eos_token" in text and "eos_token" not in special:  # of a tokenizer that was trained here
                special["eos_token"] = Tokenizer.load(beside).end
            return cls(text, special, where)

        if given in BUILT_IN:
            return made(BUILT_IN[given], given)
        path = expanded(given) if given else beside / TEMPLATE
        if given and not path.is_file():
            raise UserError(
                f"{key} = {given}: there is no such file. Name a jinja file, or one of {', '.join(BUILT_IN)}."
            )
        if path.is_file():
            return made(_read(path), str(path))
        text = settings.get("chat_template")
        if isinstance(text, list):  # several, by name
            named = {each.get("name"): each.get("template") for each in text if isinstance(each, dict)}
            text, of_tools = named.get("default"), named.get("tool_use")
            if isinstance(text, str) and isinstance(of_tools, str):  # transformers takes it where there are tools
                of_tools, text = of_tools.removesuffix("\n"), text.removesuffix("\n")  # as jinja2 does
                text = f"{{% if tools %}}{of_tools}{{% else %}}{text}{{% endif %}}"
        if not isinstance(text, str):
            raise UserError(
                f"{folder}: it has no chat template ({TEMPLATE}, or chat_template in {TOKENIZER_CONFIG}, beside "
                f"{TOKENIZER}). Give {key}: a jinja file, or {' or '.join(BUILT_IN)}."
            )
        return made(text, str(beside / TOKENIZER_CONFIG))


def _with_parsed_calls(message: Message) -> Message:
    """Return a message whose calls have objects as arguments: OpenAI's API has their JSON, which most templates would
    write as JSON again."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]} if isinstance(calls, list) else message


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _is_shown(message: Message, shown: str) -> bool:
    """Return True if a part of the text says what a message does: its calls of tools, and what follows its reasoning,
    which templates write in their own way or leave out."""
    calls = message.get("tool_calls")
    functions = [call.get("function", call) for call in calls if isinstance(call, dict)] if calls else []
    said = [str(each["name"]) for each in functions if isinstance(each, dict) and "name" in each]
    said.append(message["content"].rpartition(END_OF_REASONING)[2].strip())
    return bool(shown) and all(each in shown for each in said)


def _same_letters(one: str, other: str) -> int:
    """Return how many letters two texts begin with that are the same."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _marked(text: str) -> list[tuple[int, int]]:
    """Return the places, in text without marks, of what is marked."""
    found, at, begin = list[tuple[int, int]](), 0, None
    for letter in text:
        if letter == BEGIN_ANSWER:
            begin = at
        elif letter == END_ANSWER:
            if begin is not None:
                found.append((begin, at))
            begin = None
        else:
            at += 1
    return found


def _read(path: Path) -> str:
    try:
        return read_at_most(path, MOST_TOKENIZER_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}). Restore the file.") from None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: no JSON ({error}). Restore the file.") from None
    return found if isinstance(found, dict) else {}


def _token(value: Any) -> str:
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""


def _environment() -> Any:
    """Return jinja2's sandbox as transformers sets it up, but for the date."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return f"{BEGIN_ANSWER}{caller()}{END_ANSWER}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": TODAY.strftime}
    return environment
