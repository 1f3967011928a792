"""Conversations of tokens, packed into rows, for tests of training."""

from __future__ import annotations

import numpy as np

from argosy.data.packing import START, TRAINED, Packer, Words

VOCABULARY = 400
SEQ_LEN = 32


def conversation(random: np.random.Generator, length: int) -> Words:
    """Words of a conversation of so many tokens, about half of which are answers."""
    words = random.integers(1, VOCABULARY, length).astype(np.int32)
    words[1:] |= np.where(random.random(length - 1) < 0.5, TRAINED, 0).astype(np.int32)
    words[-1] |= TRAINED
    words[0] |= START
    return words


def conversations(count: int = 40, seed: int = 0) -> list[Words]:
    """Conversations of 2 to SEQ_LEN tokens."""
    random = np.random.default_rng(seed)
    return [conversation(random, int(random.integers(2, SEQ_LEN + 1))) for _ in range(count)]


def rows_of(units: list[Words], seq_len: int = SEQ_LEN) -> np.ndarray:
    """Rows [n, seq_len + 1] as a loader reads them: each with the first word of the next."""
    packer = Packer(seq_len, filler=0)
    rows = [row for unit in units for row in packer.add(unit)] + packer.flush()
    stream = np.concatenate([word for row in rows for word in row] + [np.zeros(1, np.int32)])
    return np.stack([stream[i : i + seq_len + 1] for i in range(0, len(stream) - 1, seq_len)])
