"""Microbatches of rows: of text, and of conversations, which say themselves what of them is learned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from argosy.data.packing import is_packed, sequences_in, unpack
from argosy.models.decoder import Microbatch, microbatch_of, microbatches
from argosy.models.preference import CHOSEN, REJECTED, Sequences


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


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
