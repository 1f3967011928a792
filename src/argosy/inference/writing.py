"""Texts as a model writes them, several at once: piece by piece, or whole."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from argosy.config.model import ModelConfig
from argosy.errors import UserError
from argosy.inference.rank_model import SampleRequest
from argosy.inference.sampling import USUAL, Completion, Finish, GrowingText, Prompt, Sampling, TextPiece
from argosy.inference.trained_model import SomeModel, ends_of_text

BATCH_SIZE = 16
"""Rows that are written at once."""


def check_text(text: str, what: str) -> None:
    """Raise UserError for a text with halves of surrogate pairs, which stand for bytes that were not UTF-8, too."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        wrong = text[problem.start : problem.start + 1]
        raise UserError(f"{what}: {wrong!r} at place {problem.start} is no character. Give text in UTF-8.") from None


class TextWriter:
    """Writes texts with a model, wherever that computes.

    Args:
        source: the model's sizes and tokenizer.
        sample: yields what `models.generate.sample_rows` does; closing it ends the work.
    """

    def __init__(self, source: SomeModel, sample: Callable[[SampleRequest], Generator[list[int | None]]]):
        #: The model's sizes.
        self.config: ModelConfig = source.run.model
        self.tokenizer = source.tokenizer
        #: The folder with the tokenizer, or its URL.
        self.home = source.home
        #: Tokens that end a text.
        self.ends = ends_of_text(source)
        self._sample = sample

    def complete(
        self, prompts: Sequence[Prompt], sampling: Sampling = USUAL, batch_size: int = BATCH_SIZE
    ) -> Iterator[Completion]:
        """Yield the texts that continue the prompts, in the prompts' order, as soon as they are whole; see `stream`."""
        found = [Completion(prompt, "", (), "") for prompt in prompts]
        told = 0
        for piece in self.stream(prompts, sampling, batch_size):
            so_far = found[piece.row]
            tokens = (*so_far.tokens, piece.token)
            found[piece.row] = replace(so_far, text=so_far.text + piece.text, tokens=tokens, finish=piece.finish)
            while told < len(found) and found[told].finish:
                yield found[told]
                told += 1

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling = USUAL,
        batch_size: int = BATCH_SIZE,
        are_answers: bool = False,
    ) -> Generator[TextPiece]:
        """Yield the texts that continue the prompts, piece by piece, as the model writes them.

        `batch_size` are written at once, those with the shortest prompts first. Row i is drawn with the seed
        sampling.seed + i, so that its text does not depend on the others. Closing the iterator ends the work.
        are_answers: the texts are messages, which begin anew after their prompts.

        Raises: UserError, before anything is computed, for settings that make no sense, and for a prompt that is empty
        or leaves no room in the model's context.
        """
        sampling.check()
        if batch_size < 1:
            raise UserError(f"batch_size = {batch_size}: must be at least 1.")
        ids = [self.tokens_of(prompt) for prompt in prompts]
        for row, tokens in enumerate(ids):
            if len(tokens) >= self.config.max_seq_len:
                which = f"prompt {row + 1}" if len(ids) > 1 else "the prompt"
                raise UserError(
                    f"{which} has {len(tokens)} tokens and model.max_seq_len is {self.config.max_seq_len}. Shorten it."
                )
        by_length = sorted(range(len(ids)), key=lambda row: len(ids[row]))
        alike = [[row for row in by_length if self._is_long(ids[row], sampling) == kind] for kind in (False, True)]
        batches = [some[first : first + batch_size] for some in alike for first in range(0, len(some), batch_size)]
        return (piece for rows in batches for piece in self._batch(rows, ids, sampling, are_answers))

    def _is_long(self, tokens: Sequence[int], sampling: Sampling) -> bool:
        """Return True for a row beyond the original context of longrope: all rows of its batch rotate as it does."""
        scaling = self.config.rope_scaling
        most = len(tokens) + self._limit(tokens, sampling)
        return scaling.kind == "longrope" and most > scaling.original_max_seq_len

    def _limit(self, tokens: Sequence[int], sampling: Sampling) -> int:
        """Return the most new tokens of a row."""
        return min(sampling.max_tokens, self.config.max_seq_len - len(tokens))

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt; those of a text begin as documents do (`encode_prompt`).

        Raises: UserError for ids that the model does not know, or none, and for a text that UTF-8 cannot say.
        """
        if isinstance(prompt, str):
            check_text(prompt, "a prompt")
            return self.tokenizer.encode_prompt(prompt)
        if not prompt:
            raise UserError('a prompt without tokens: give at least one, or the text "" for a new document.')
        self.check_ids(min(prompt), max(prompt), "a prompt")
        return list(prompt)

    def check_ids(self, least: float, most: float, what: str) -> None:
        """Raise UserError for token ids that the model does not know; what: their name in the message."""
        if least < 0 or most >= self.config.vocab_size:
            wrong = least if least < 0 else most
            raise UserError(f"{what}: token {wrong}, and the model knows those from 0 to {self.config.vocab_size - 1}.")

    def _batch(
        self, rows: Sequence[int], ids: Sequence[Sequence[int]], sampling: Sampling, are_answers: bool
    ) -> Iterator[TextPiece]:
        """Yield the pieces of some rows, which are written together."""
        limits = [self._limit(ids[row], sampling) for row in rows]
        seeds = [sampling.seed + row for row in rows]
        prompts = [list(ids[row]) for row in rows]
        request = SampleRequest(prompts, limits, seeds, sampling.temperature, sampling.top_p, sorted(self.ends))
        before = [[] if are_answers else prompt for prompt in prompts]
        texts = [GrowingText(self.tokenizer, sampling.stop, after) for after in before]
        left = dict(enumerate(limits))
        with closing(self._sample(request)) as steps:
            for told in steps:
                for i, token in enumerate(told):
                    if token is None or i not in left:
                        continue
                    left[i] -= 1
                    is_end = token in self.ends
                    text = "" if is_end else texts[i].add(token)
                    finish: Finish = "stop" if is_end or texts[i].is_stopped else "" if left[i] else "length"
                    if finish:
                        text += texts[i].rest()
                        del left[i]
                    yield TextPiece(rows[i], text, token, finish)
                if not left:
                    return
