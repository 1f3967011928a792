"""Settings by which texts are drawn from a model, and what comes out: pieces and whole completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from argosy.data.tokenizer import Tokenizer
from argosy.errors import UserError

MOST_SEED = 2**62
Prompt = str | Sequence[int]
"""A text, which begins a document; or token ids, which are taken as they are."""
Finish = Literal["", "stop", "length"]
"""The reason why a text ended: a stop word or an end of text, or no more tokens were allowed; "": it goes on."""


@dataclass(frozen=True)
class Sampling:
    """Settings by which texts are drawn."""

    max_tokens: int = 200
    """The most tokens of a text; the model's context may allow fewer."""
    temperature: float = 0.8
    """0 takes the likeliest token each time; higher is more varied."""
    top_p: float = 0.95
    """Draw from the likeliest tokens that together have this probability."""
    seed: int = 0
    """Row i of a batch is drawn with the seed + i."""
    stop: tuple[str, ...] = ()
    """Texts to stop before."""

    def check(self, spell: Callable[[str], str] = lambda key: f"{key} =") -> None:
        """Raise UserError for a value that makes no sense. spell: how a message names a key."""
        problem = ""
        if not self.max_tokens >= 1:
            problem = f"{spell('max_tokens')} {self.max_tokens}: must be at least 1."
        elif not 0 <= self.temperature < float("inf"):
            problem = f"{spell('temperature')} {self.temperature}: must be 0 or more. Try 0.8."
        elif not 0 < self.top_p <= 1:
            problem = f"{spell('top_p')} {self.top_p}: must be above 0 and at most 1. Try 0.95."
        elif not 0 <= self.seed < MOST_SEED:
            problem = f"{spell('seed')} {self.seed}: must be from 0 to 2^62 - 1."
        elif "" in self.stop:
            problem = f'{spell("stop")} "": every text has the empty one in it. Leave it out, or name a text.'
        if problem:
            raise UserError(problem)


USUAL = Sampling()


@dataclass(frozen=True)
class TextPiece:
    """One token, and what it adds to its text."""

    row: int
    """The number of the prompt that it continues."""
    text: str
    """May be empty: the token is in the middle of a character, or may begin a stop word."""
    token: int
    finish: Finish = ""
    """The reason why the text ends with this piece."""


@dataclass(frozen=True)
class Completion:
    """A text that continues a prompt."""

    prompt: Prompt
    text: str
    tokens: tuple[int, ...]
    """All that were drawn, the one that ended the text too."""
    finish: Finish


MOST_AGAIN = 64
"""Tokens that are decoded again with each new one: with all, the time of a text would be the square of its length."""


class GrowingText:
    """The text of tokens that come one by one: what is told of it never changes afterwards.

    Held back is what may be the beginning of a stop word, and the bytes of a character that is not whole yet.
    after: the tokens before the text that it goes on from; none: it begins anew.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], after: Sequence[int] = ()):
        self._tokenizer, self._stop, self._after = tokenizer, stop, after
        self._tokens = list[int]()
        self._told = ""
        self.is_stopped = False
        """True once a stop word came; what was told ends before it."""

    def add(self, token: int) -> str:
        """Return the text that may be told now."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens, self._after)
        ends = [text.index(word) for word in self._stop if word in text]
        if ends:
            self.is_stopped = True
            return text[len(self._told) : min(ends)]
        held = max((n for word in self._stop for n in range(len(word)) if text.endswith(word[:n])), default=0)
        safe = text[: len(text) - held]
        if safe.endswith("\N{REPLACEMENT CHARACTER}") or not safe.startswith(self._told):
            return ""  # the middle of a character: the next token ends it
        new, self._told = safe[len(self._told) :], safe
        if new and not held and len(self._tokens) >= MOST_AGAIN:  # what follows is its own text, and so are stop words
            self._tokens, self._after, self._told = [], [token], ""
        return new

    def rest(self) -> str:
        """Return what was held back, at the end of the tokens."""
        return "" if self.is_stopped else self._tokenizer.decode(self._tokens, self._after)[len(self._told) :]
