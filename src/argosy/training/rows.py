"""Microbatches of rows: of text, and of conversations, which say themselves what of them is learned."""

from __future__ import annotations

import numpy as np
import torch

from argosy.data.packing import is_packed, unpack
from argosy.models.decoder import Microbatch, microbatch_of, microbatches


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
    return microbatch_of(torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(positions), device)
