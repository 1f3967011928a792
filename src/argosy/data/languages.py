"""The language of a text: py3langid's model and its numbers, bit for bit, for many bytes of a text at once.

The model finds the n-grams of a text's bytes with an automaton (Aho & Corasick 1975): its state after a byte is the
longest n-gram, or beginning of one, that ends there. So it depends on no more bytes than the longest n-gram has, and a
text can be cut into lanes, each begun that many bytes early, through which the automaton goes in step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

LANE_BYTES = 16
"""Bytes of a lane. Longer ones repeat less and are fewer at once: this is the fastest from 1,000 bytes of text on."""
SHORT_BYTES = 700
"""A shorter text is faster byte by byte."""
BLOCK_BYTES = 2**20
"""Bytes that go through at once, so that a long text takes little memory."""


class Automaton:
    """The automaton of a model, whose state 0 is the one before a text.

    Args:
        next_state: the states after each byte, 256 for each row.
        row: the row of each state.
        output: the n-gram that ends in each state; -1: none.
    """

    def __init__(self, next_state: Sequence[int], row: Sequence[int], output: Sequence[int]):
        self._next, self._output = np.asarray(next_state), np.asarray(output)
        self._base = np.asarray(row, np.int64) * 256
        self._before = self._longest() - 1

    def visits(self, text: bytes) -> Counter[int]:
        """Count the n-grams in a text; the first found come first."""
        found = Counter[int]()
        padded = np.frombuffer(bytes(self._before) + text, np.uint8)
        for at in range(0, len(text), BLOCK_BYTES):
            found.update(self._ngrams(padded[at : at + self._before + BLOCK_BYTES], at == 0))
        return found

    def _ngrams(self, block: npt.NDArray[np.uint8], is_first: bool) -> list[int]:
        """Return the n-grams that end after the first bytes of a block, which are those before it."""
        size, before = len(block) - self._before, self._before
        lanes = -(-size // LANE_BYTES)
        padded = np.zeros(before + lanes * LANE_BYTES, np.uint8)
        padded[: len(block)] = block
        in_step = np.lib.stride_tricks.sliding_window_view(padded, before + LANE_BYTES)[::LANE_BYTES].T
        states, found = np.zeros(lanes, np.int64), np.empty((LANE_BYTES, lanes), np.int64)
        for number, letters in enumerate(np.ascontiguousarray(in_step)):
            states = self._next[self._base[states] + letters]
            if number >= before:
                found[number - before] = self._output[states]
            elif is_first:
                states[0] = 0  # nothing comes before a text
        ngrams = found.T.reshape(-1)[:size]
        return ngrams[ngrams >= 0].tolist()

    def _longest(self) -> int:
        """Return the bytes of the longest n-gram: the most steps from state 0 to a state."""
        rows = self._next.reshape(-1, 256)
        known = np.zeros(len(self._base), bool)
        states, steps = np.zeros(1, np.int64), 0
        known[0] = True
        while True:
            before = known.copy()
            known[rows[np.unique(self._base[states] // 256)]] = True
            states = np.flatnonzero(known & ~before)
            if not states.size:
                return steps
            steps += 1


def language_identifier(langid: Any) -> Any:
    """Return the identifier of the module `py3langid.langid`, faster with long texts; its scores are probabilities."""

    class Identifier(langid.LanguageIdentifier):  # type: ignore[misc]
        def _raw_score(self, text: bytes) -> Any:
            visits = automaton.visits(text) if len(text) >= SHORT_BYTES else None
            return self._sparse_score(visits, self.nb_ptc) if visits else super()._raw_score(text)

    made = Identifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
    made.nb_ptc = made.nb_ptc.astype(np.float32)  # in half precision, each text's part would be converted
    automaton = Automaton(made.tk_nextmove, made.tk_row, made.tk_output)
    return made
