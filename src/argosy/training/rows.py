"""Microbatches of rows, and scores of the answers in them, under any plan.

Rows are of text, or of whole conversations, which say themselves what of them is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from argosy.accelerator import sent_to
from argosy.config.schema import RunConfig
from argosy.data.packing import START, TRAINED, Words, is_packed, sequences_in, unpack
from argosy.models.decoder import Microbatch, microbatch_of, microbatches
from argosy.models.dropout import mask_keys
from argosy.models.preference import CHOSEN, REJECTED, Sequences
from argosy.parallel.model import ParallelModel
from argosy.parallel.world import World


def microbatches_of(rows: np.ndarray, size: int, end_of_document: int, device: torch.device) -> list[Microbatch]:
    """Cut rows (int32 [n, T+1]) into microbatches of `size` rows.

    A microbatch may have rows of both kinds, if a mixture has; each row is what its first word says.
    """
    return [_microbatch(rows[i : i + size], end_of_document, device) for i in range(0, len(rows), size)]


def _microbatch(rows: np.ndarray, end_of_document: int, device: torch.device) -> Microbatch:
    of_chats = [i for i in range(len(rows)) if is_packed(rows[i : i + 1])]
    if not of_chats:
        return microbatches(rows, len(rows), end_of_document, device)[0]
    tokens, targets, positions = (np.empty((len(rows), rows.shape[1] - 1), np.int64) for _ in range(3))
    tokens[of_chats], targets[of_chats], positions[of_chats] = unpack(rows[of_chats])
    if text := [i for i in range(len(rows)) if i not in of_chats]:
        micro = microbatches(rows[text], len(text), end_of_document, torch.device("cpu"))[0]
        tokens[text], targets[text], positions[text] = micro.tokens_BT, micro.targets_BT, micro.positions_BT
    return microbatch_of(_tensor(tokens), _tensor(targets), _tensor(positions), device)


def compared_microbatches(
    rows: np.ndarray, size: int, device: torch.device, is_judged: bool, reference: np.ndarray | None = None
) -> list[Microbatch]:
    """Cut rows of pairs or judged answers (int32 [n, T+1]) into microbatches of `size` rows.

    is_judged: each answer counts, not each pair. reference: log-probabilities of the rows' answers before training, in
    their order, fp32 [n, most answers of a row].
    """
    values = np.zeros((len(rows), 0), np.float32) if reference is None else reference
    parts = (slice(i, i + size) for i in range(0, len(rows), size))
    return [_compared(rows[part], values[part], device, is_judged) for part in parts]


def _compared(rows: np.ndarray, values: np.ndarray, device: torch.device, is_judged: bool) -> Microbatch:
    found = sequences_in(rows)
    reference = np.zeros(found.kinds.shape, np.float32)
    for row, (kinds, known) in enumerate(zip(found.kinds, values, strict=True)):
        begins = np.flatnonzero(kinds)[: len(known)]
        reference[row, begins] = known[: len(begins)]
    tokens, targets, positions = (_tensor(part) for part in unpack(rows))
    sequences = Sequences(*(_tensor(part) for part in (*found, reference)))
    micro = microbatch_of(tokens, targets, positions, device, sequences)
    is_chosen = found.kinds == CHOSEN
    answers = is_chosen | (found.kinds == REJECTED) if is_judged else is_chosen
    return replace(micro, answers=int(answers.sum()), counted=int(found.lengths[is_chosen].sum()))


def with_mask_keys(micros: list[Microbatch], run: RunConfig, step: int, first_row: int) -> list[Microbatch]:
    """Return the microbatches of a step with what `lora.dropout` draws from; `first_row` is their first one's among
    those of the whole batch."""
    if not run.lora.dropout:
        return micros
    found = []
    for micro in micros:
        rows, tokens = micro.positions_BT.shape
        keys_BT = sent_to(micro.positions_BT.device, mask_keys(run.seed, step, first_row, rows, tokens))
        found.append(replace(micro, mask_keys_BT=keys_BT))
        first_row += rows
    return found


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


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


def scores_of_rows(
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
        scored = model.score_batch(compared_microbatches(batch, microbatch, world.device, is_judged))
        if scored is not None:
            scores, kinds = torch.cat(scored).cpu().numpy(), sequences_in(batch).kinds
            found += [(int(row), scores[i, np.flatnonzero(kinds[i])]) for i, row in enumerate(some)]
    most = max(world.gather(max((len(scores) for _, scores in found), default=1), int))
    table = np.zeros((rows, most, 2), np.float32)
    for row, scores in found:
        table[row, : len(scores)] = scores
    return world.sum(torch.from_numpy(table).to(world.device)).cpu().numpy()


def request_rows(requests: Sequence[Request], seq_len: int, filler: int) -> tuple[Words, list[tuple[int, int]]]:
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
