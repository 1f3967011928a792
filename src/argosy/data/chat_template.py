"""A model's chat template: renders conversations as text, as transformers does, and finds the answers in it.

The answers are what the template marks by `{% generation %}`. Most templates mark nothing; then an answer is what a
conversation has more than its prompt: the text up to and with message i, less the text up to message i with the
opening of an answer after it. Some templates write an answer in another way when others follow, mostly without its
reasoning. What is learned is what the model is to write, so such an answer is put into the text as the template writes
it when it is the last, as TRL's templates for training and LLaMA-Factory do. Each way is checked: the difference must
hold what the message says. A conversation in which no way finds all answers is refused.

A template comes with a model from somewhere, so it runs in jinja2's sandbox, sees plain JSON and nothing else.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from argosy.data.conversations import BadRecord, Conversation, Message
from argosy.data.manifest import TEMPLATE, TOKENIZER
from argosy.data.stores.model_folder import TOOLS_TEMPLATE, with_tools
from argosy.data.tokenizer import MOST_TOKENIZER_BYTES, Tokenizer, tokenizer_file
from argosy.errors import UserError
from argosy.files import expanded, json_of, read_at_most

TOKENIZER_CONFIG, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
"""Files beside a tokenizer.json: its settings, which may have a chat template, and its special tokens."""
UNSHOWN_ANSWERS = "answers that the template does not show"
REFUSED_BY_TEMPLATE = "conversation that the template refuses"
BEGIN_ANSWER, END_ANSWER = "\ufdd0", "\ufdd1"
"""Marks of an answer in rendered text: two of Unicode's noncharacters, which no text has."""
SOME_ANSWER = "\ufdd2"
"""Stands for an answer where the template is asked how one ends: another noncharacter."""
PLAIN: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": SOME_ANSWER}]
"""A conversation that each template should take."""
BEGIN_OF_REASONING, END_OF_REASONING = "<think>", "</think>"
"""The marks that models write around their reasoning."""
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
        self.special = special
        self.text = text
        try:
            self._template = _environment().from_string(text)
        except Exception as error:  # Python's compiler has its own: of what is nested too deep, for one
            raise UserError(f"{where}: not a chat template ({error}). Restore it, or give another.") from None
        self.marks_answers = "generation" in text and BEGIN_ANSWER in self._try_marks()

    def _try_marks(self) -> str:
        try:
            return self.marked([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], None)
        except BadRecord:
            return ""

    def render(self, messages: list[Message], tools: list[Any] | None = None, opens_answer: bool = False) -> str:
        """Return the text of messages; opens_answer: with the opening of an answer after it. Raises: BadRecord."""
        return self.marked(messages, tools, opens_answer).replace(BEGIN_ANSWER, "").replace(END_ANSWER, "")

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
        tail = self.end.strip()
        if not tail:  # GLM's ends with what begins the next message
            return _first_of(special, self.before("user"))
        return _first_of(special, tail) or tail.partition("\n")[0]

    def conversation(self, conversation: Conversation, special: Collection[str] = ()) -> RenderedConversation:
        """Return the text of a conversation and its answers. Raises: BadRecord if they are not found.

        special: tokens that may end an answer.
        """
        said = json.dumps(conversation.messages, ensure_ascii=False, default=str)
        if any(mark in said for mark in (BEGIN_ANSWER, END_ANSWER, SOME_ANSWER)):
            raise BadRecord(UNSHOWN_ANSWERS, "a message holds one of the characters U+FDD0 to U+FDD2")
        return _AnswerFinder(self, conversation, special).found()

    @cached_property
    def end(self) -> str:
        """The text after the last answer. Raises: BadRecord if a plain conversation is refused."""
        return self.render(PLAIN).rpartition(SOME_ANSWER)[2]

    def before(self, role: str) -> str:
        """Return what is written between an answer and a message of such a role; empty if that is refused."""
        with suppress(BadRecord):
            return self.render([*PLAIN, {"role": role, "content": "a"}]).rpartition(SOME_ANSWER)[2]
        return ""

    def marked(self, messages: list[Message], tools: list[Any] | None, opens_answer: bool = False) -> str:
        """Return the text as `render` does, with the marks of answers that the template sets. Raises: BadRecord."""
        if not any(message.get("tool_calls") for message in messages):
            return self._rendered(messages, tools, opens_answer)
        try:
            return self._rendered([_with_calls(message, _parsed) for message in messages], tools, opens_answer)
        except BadRecord:  # DeepSeek's asks for text
            return self._rendered([_with_calls(message, _as_text) for message in messages], tools, opens_answer)

    def _rendered(self, messages: list[Message], tools: list[Any] | None, opens_answer: bool) -> str:
        try:
            return self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=opens_answer, **self.special
            )
        except Exception as error:  # it computes as Python does: a division by zero, a range that is too large
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
            has_two = not given and (beside / TOOLS_TEMPLATE).is_file()
            text = with_tools(_read(path), _read(beside / TOOLS_TEMPLATE)) if has_two else _read(path)
            return made(text, str(path))
        found = settings.get("chat_template")
        if isinstance(found, list):  # several, by name
            named = {str(each.get("name")): each.get("template") for each in found if isinstance(each, dict)}
            found, of_tools = named.get("default"), named.get("tool_use")
            if isinstance(found, str) and isinstance(of_tools, str):
                found = with_tools(found, of_tools)
        if not isinstance(found, str):
            raise UserError(
                f"{folder}: it has no chat template ({TEMPLATE}, or chat_template in {TOKENIZER_CONFIG}, beside "
                f"{TOKENIZER}). Give {key}: a jinja file, or {' or '.join(BUILT_IN)}."
            )
        return made(found, str(beside / TOKENIZER_CONFIG))


class _AnswerFinder:
    """Finds the answers of one conversation in its text."""

    def __init__(self, template: ChatTemplate, conversation: Conversation, special: Collection[str]):
        """special: as of `ChatTemplate.conversation`. Raises: BadRecord if no answer is to be learned."""
        self._template, self._special = template, special
        self._messages, self._tools = conversation.messages, conversation.tools
        self._numbers = [n for n, message in enumerate(self._messages) if message["role"] == "assistant"]
        self._learned = [
            n for n in self._numbers if n >= conversation.prompt and self._messages[n].get("weight", 1) != 0
        ]
        if not self._learned:
            raise BadRecord(UNSHOWN_ANSWERS, "no answer is to be learned: each has weight 0")
        self._marked = template.marked(self._messages, self._tools)
        self._text = self._marked.replace(BEGIN_ANSWER, "").replace(END_ANSWER, "")

    def found(self) -> RenderedConversation:
        """Return the text and the answers in it. Raises: BadRecord if they are not found."""
        text, places = self._by_marks() if self._template.marks_answers else self._by_prefixes()
        for number in self._learned:
            if not _is_shown(self._messages[number], "".join(text[begin:end] for begin, end in places[number])):
                raise BadRecord(
                    UNSHOWN_ANSWERS, f"the chat template does not show where the answer in message {number} is"
                )
        answers = [place for number in self._learned for place in places[number]]
        return RenderedConversation(text, answers, [places[number][-1][1] for number in self._learned])

    def _by_marks(self) -> tuple[str, dict[int, list[tuple[int, int]]]]:
        """Return the text, and the answers' places in it."""
        found, text, numbers = _marked(self._marked), self._text, self._numbers
        if len(found) < len(numbers):
            raise BadRecord(
                UNSHOWN_ANSWERS, f"the chat template marks {len(found)} answers, and there are {len(numbers)}"
            )
        if len(found) == len(numbers):
            return text, {number: [place] for number, place in zip(numbers, found, strict=True)}
        # A message's reasoning, text and calls, or the end of all, are marked apart.
        openings = [self._before(number, opens_answer=True) for number in numbers]
        begins = [_same_letters(opening, text) for opening in openings]
        at = [max(0, bisect_right(begins, begin) - 1) for begin, _ in found]
        return text, {n: [place for place, i in zip(found, at, strict=True) if i == k] for k, n in enumerate(numbers)}

    def _by_prefixes(self) -> tuple[str, dict[int, list[tuple[int, int]]]]:
        """Return the text, with each answer as it is written when it is the last, and the answers' places."""
        text, messages, special = self._text, self._messages, self._special
        places, written, at = dict[int, list[tuple[int, int]]](), "", 0
        for number in self._learned:
            prompt = self._before(number, opens_answer=True)
            whole = self._before(number + 1)
            if not text.startswith(whole):  # Phi-3's ends all text with what it leaves out where others follow
                whole = whole.removesuffix(self._template.special.get("eos_token", ""))
            begin, end, opening, said = len(prompt), len(whole), "", whole[len(prompt) :]
            if whole.startswith(prompt) and text.startswith(whole):
                kept = said.rstrip()  # a line's end after the token that ends a turn is the template's
                if len(kept) > len(messages[number]["content"].strip()) and kept.endswith((">", "]", "|")):
                    end, said = len(prompt) + len(kept), kept
            else:
                begin, end, opening, said = self._as_last(number, at, prompt)
            if not any(said.rstrip().endswith(token) for token in special):  # GLM: what begins the next message
                follows = "tool" if messages[number].get("tool_calls") else "user"
                token = _first_of(special, text[end:] or self._template.before(follows))
                end, said = end + len(token), said + token
            written += text[at:begin] + opening
            places[number] = [(len(written), len(written) + len(said))]
            written, at = written + said, end
        return written + text[at:], places

    def _as_last(self, number: int, at: int, prompt: str) -> tuple[int, int, str, str]:
        """Return where an answer begins and ends in the text, and what is to stand there: what the prompt opens of it,
        and the rest, as it is written when it is the last. at: where the answer before it ends. Raises: BadRecord if
        the template does not show it.
        """
        text, messages, special = self._text, self._messages, self._special
        after, other = self._template.end, PLAIN[1]
        last = self._before(number + 1)
        changed = self._template.render([*messages[:number], other, *messages[number + 1 :]], self._tools)
        head, mark, rest = changed.partition(SOME_ANSWER)
        opened = prompt[_same_letters(prompt, self._before(number)) :]
        before = text[: _same_letters(text, head)]
        # What opens reasoning may be missing where others follow, or be written in another way.
        found = before.rfind(opened.partition(BEGIN_OF_REASONING)[0], at)
        header = _same_letters(before[found:], opened)
        start = len(prompt) - len(opened) + header
        is_shown = mark and last.startswith(prompt[:start]) and last.endswith(after) and text.endswith(rest)
        if found < 0 or not is_shown:
            raise BadRecord(
                UNSHOWN_ANSWERS,
                f"the chat template writes message {number} in another way when others follow; mark answers in it by "
                "{% generation %} ... {% endgeneration %}",
            )
        said, content = last[start : len(last) - len(after)], messages[number]["content"]
        if header < len(opened) and END_OF_REASONING in content and END_OF_REASONING not in said:
            said = content  # the template opens reasoning that it leaves out of what was said
        opening = said[: _same_letters(said, opened[header:])]
        end, own_end, end_here = len(text) - len(rest), _first_of(special, after), _first_of(special, rest)
        if not own_end and rest.startswith(after.rstrip()):
            own_end = end_here = after.rstrip()
        return found + header, end + len(end_here), opening, said[len(opening) :] + own_end

    def _before(self, number: int, opens_answer: bool = False) -> str:
        """Return the text of the messages before one. Raises: BadRecord."""
        return self._template.render(self._messages[:number], self._tools, opens_answer)


def _with_calls(message: Message, made: Callable[[Any], Any]) -> Message:
    """Return a message whose calls have the arguments that `made` makes of theirs."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_call(call, made) for call in calls]} if isinstance(calls, list) else message


def _call(call: Any, made: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": made(function["arguments"])}}


def _parsed(arguments: Any) -> Any:
    """Return arguments as an object: OpenAI's API has their JSON, which most templates would write as JSON again."""
    try:
        found = json_of(arguments)
    except (TypeError, ValueError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def _is_shown(message: Message, shown: str) -> bool:
    """Return True if a part of the text says what a message does: its calls of tools, and what follows its reasoning,
    which templates write in their own way or leave out."""
    calls = message.get("tool_calls")
    functions = [call.get("function", call) for call in calls if isinstance(call, dict)] if calls else []
    said = [str(each["name"]) for each in functions if isinstance(each, dict) and "name" in each]
    said.append(message["content"].rpartition(END_OF_REASONING)[2].strip())
    return bool(shown) and all(each in shown for each in said)


def _first_of(special: Collection[str], text: str) -> str:
    """Return the longest token that a text begins with; empty if there is none."""
    return max((token for token in special if text.startswith(token)), key=len, default="")


def _same_letters(one: str, other: str) -> int:
    """Return how many letters two texts begin with that are the same."""
    same, most = 0, min(len(one), len(other))
    while same < most:
        middle = (same + most + 1) // 2
        same, most = (middle, most) if one[same:middle] == other[same:middle] else (same, middle - 1)
    return same


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
        found = json_of(_read(path))
    except ValueError as error:
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
