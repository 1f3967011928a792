"""Conversations with a loaded model: messages become a prompt through its template, and an answer ends its turn."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from argosy.data.chat_encoder import check_spelling
from argosy.data.chat_template import ChatTemplate
from argosy.data.conversations import BadRecord, Message, messages_of
from argosy.data.manifest import TOKENIZER
from argosy.data.stores.store import is_url
from argosy.data.tokenizer import usage_of
from argosy.errors import UserError
from argosy.inference.loaded_model import LoadedModel
from argosy.inference.sampling import Sampling, TextPiece

KEY = "--template"
"""The option that gives a template."""
ANSWER = "\ufdd2"
"""Stands for an answer where the template is asked how one ends: a noncharacter of Unicode, which no text has."""


class ChatModel:
    """A loaded model with its chat template. It ends texts at the end of a turn too."""

    def __init__(self, model: LoadedModel, template: str = ""):
        """template: a jinja file, or the name of a built-in one; empty: the model's own.

        Raises: UserError if there is none, or it refuses a plain conversation.
        """
        self.model = model
        self.template = _template_of(model, template)
        self._special = model.tokenizer.special_tokens
        self.turn_end = self._turn_end()
        """The text that ends an answer; empty if the template puts nothing after one."""
        self._stop: tuple[str, ...] = (self.turn_end,) if self.turn_end else ()
        tokens = model.tokenizer.encode_template(self.turn_end)
        if len(tokens) == 1 and tokens[0] in self._special.values():  # decoded text does not show it
            model.ends |= {tokens[0]}
            self._stop = ()

    def prompt_of(self, messages: Any) -> list[int]:
        """Return the tokens of a conversation up to the answer that is to be written.

        messages: as JSON has them: a list of {"role", "content"}. Raises: UserError.
        """
        try:
            read: list[Message] = messages_of(messages, "messages")
            check_spelling(read, self._special)
            text = self.template.render(read, opens_answer=True)
        except BadRecord as problem:
            raise UserError(f"{problem.detail}. Send other messages.") from None
        return self.model.tokenizer.encode_template(text)

    def stream(self, prompts: Sequence[list[int]], sampling: Sampling) -> Generator[TextPiece]:
        """Yield the answers to prompts of `prompt_of` as they are written; see `LoadedModel.stream`."""
        return self.model.stream(prompts, replace(sampling, stop=(*sampling.stop, *self._stop)))

    def _turn_end(self) -> str:
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ANSWER}]
        try:
            after = self.template.render(said).rpartition(ANSWER)[2]
        except BadRecord as problem:
            raise UserError(f"{self.model.home}: its chat template refuses a conversation: {problem.detail}") from None
        tail = after.strip()
        first = [token for token in self._special if tail.startswith(token)]
        return max(first, key=len, default=tail.partition("\n")[0])


def _template_of(model: LoadedModel, given: str) -> ChatTemplate:
    if not is_url(model.home):
        return ChatTemplate.load(Path(model.home), given, KEY)
    with TemporaryDirectory() as scratch:
        for name, data in usage_of(model.home).items():
            (Path(scratch) / name).write_bytes(data)
        (Path(scratch) / TOKENIZER).touch()
        return ChatTemplate.load(Path(scratch), given, KEY)
