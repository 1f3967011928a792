"""Conversations of tokens, packed into rows, for tests of training."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from argosy.data.packing import ID_MASK, START_BIT, TRAINED, Packer, Words, sequences_in
from argosy.models.decoder import Decoder

VOCABULARY = 400
SEQ_LEN = 32


def conversation(random: np.random.Generator, length: int) -> Words:
    """Words of a conversation of so many tokens, about half of which are answers."""
    words = random.integers(1, VOCABULARY, length).astype(np.int32)
    words[1:] |= np.where(random.random(length - 1) < 0.5, TRAINED, 0).astype(np.int32)
    words[-1] |= TRAINED
    words[0] |= START_BIT
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


def scores(model: Decoder, row: np.ndarray) -> list[tuple[int, Tensor, int]]:
    """Of each sequence of a row, alone in the model: its kind, its answer's log-probability or score, its tokens."""
    found = []
    kinds = sequences_in(row[None]).kinds[0]
    starts = [*np.flatnonzero(row[:-1] & START_BIT), len(row) - 1]
    for begin, end in itertools.pairwise(starts):
        words = torch.from_numpy(row[begin:end].astype(np.int64))
        if kinds[begin]:
            ids, learned = words & ID_MASK, words[1:] & TRAINED != 0
            outputs = model(ids[None])[0]
            if model.score is not None:
                value = outputs[-1, 0]
            else:
                value = outputs[:-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)[learned].sum()
            found.append((int(kinds[begin]), value, int(learned.sum())))
    return found


@torch.no_grad()
def reference_of(model: Decoder, rows: np.ndarray) -> np.ndarray:
    found = [[float(logp) for _, logp, _ in scores(model, row)] for row in rows]
    most = max(map(len, found))
    return np.array([[*some, *[0.0] * (most - len(some))] for some in found], np.float32)
