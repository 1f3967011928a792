"""Scores of the answers in rows of whole conversations, under any plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from argosy.data.packing import START, TRAINED, Words, sequences_in
from argosy.parallel.model import ParallelModel
from argosy.parallel.world import World
from argosy.training.rows import compared_microbatches

Request = tuple[list[int], list[int]]
"""Tokens of a context, at least one, and of its continuation, whose log-probability is asked for."""


@dataclass(frozen=True)
class WriteRequest:
    """A text that a task has the model write."""

    prompt: str
    stop: list[str]
    max_tokens: int
    temperature: float
    """0: the likeliest token each time."""
    top_p: float


TaskScores = dict[str, dict[str, float]]
"""Task -> metric -> value. A metric that lm-eval computes after a filter is called METRIC/FILTER."""


def answer_scores(
    model: ParallelModel,
    rows: int,
    read: Callable[[np.ndarray], np.ndarray],
    microbatch: int,
    world: World,
    before_batch: Callable[[int, int], None],
    is_judged: bool,
) -> np.ndarray:
    """Return the log-probability of each answer, and how many of its tokens are not the likeliest, fp32 [rows, most
    answers of a row, 2]. All ranks call it together, and get the same.

    read: returns the rows of these numbers, int32 [n, T+1]. before_batch(i, n) is called before the i-th of n batches;
    what it raises, it raises on all ranks alike. is_judged: as of `compared_microbatches`.
    """
    mine = np.arange(model.dp_rank, rows, model.dp)
    size = microbatch * model.microbatches_at_once
    batches = -(-rows // (model.dp * size))
    found: list[tuple[int, np.ndarray]] = []
    for number in range(batches):
        before_batch(number + 1, batches)
        some = mine[number * size : (number + 1) * size]
        batch = read(np.concatenate([some, np.zeros(size - len(some), np.int64)]))
        scored = model.answer_scores(compared_microbatches(batch, microbatch, world.device, is_judged))
        if scored is not None:
            scores, kinds = torch.cat(scored).cpu().numpy(), sequences_in(batch).kinds
            found += [(int(row), scores[i, np.flatnonzero(kinds[i])]) for i, row in enumerate(some)]
    most = max(world.gather(max((len(scores) for _, scores in found), default=1), int))
    table = np.zeros((rows, most, 2), np.float32)
    for row, scores in found:
        table[row, : len(scores)] = scores
    return world.sum(torch.from_numpy(table).to(world.device)).cpu().numpy()


def packed(requests: Sequence[Request], seq_len: int, filler: int) -> tuple[Words, list[tuple[int, int]]]:
    """Return rows of requests, int32 [n, seq_len + 1], and the row of each request and its place among those there.

    A request is a sequence of its own, whose continuation is learned (`data.packing`); of one that is longer than a
    row, the end is taken.
    """
    units = [_unit(context, continuation)[-seq_len:] for context, continuation in requests]
    places: list[tuple[int, int]] = [(0, 0)] * len(units)
    rows, room, count = list[Words](), 0, 0
    for number in sorted(range(len(units)), key=lambda number: -len(units[number])):
        unit = units[number]
        if len(unit) > room:
            rows.append(np.full(seq_len + 1, filler, np.int32))
            room, count = seq_len, 0
        rows[-1][seq_len - room : seq_len - room + len(unit)] = unit
        rows[-1][seq_len - room] |= START
        places[number] = len(rows) - 1, count
        room, count = room - len(unit), count + 1
        rows[-1][seq_len - room] |= START  # of what is next, or of the filler
    return np.stack(rows), places


def _unit(context: list[int], continuation: list[int]) -> Words:
    unit = np.array([*context, *continuation], np.int32)
    unit[len(context) :] |= TRAINED
    return unit
