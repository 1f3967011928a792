"""Rows of token ids become microbatches, the input of the model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from argosy.models.decoder import document_starts


@dataclass(frozen=True)
class Microbatch:
    """The rows that go through the model at once. They are whole; each rank takes its part of them by the layout."""

    tokens_BT: Tensor
    targets_BT: Tensor
    """The token after each token."""
    positions_BT: Tensor
    """Each token's place in its document."""
    documents: Tensor
    """The places where documents start (`attention.packed_attention`)."""


def microbatches(rows: np.ndarray, size: int, end_of_document: int, device: torch.device) -> list[Microbatch]:
    """Cut `rows` (int32 [n, T+1], overlapping windows of the token stream) into microbatches of `size` rows."""
    return [_microbatch(rows[i : i + size], end_of_document, device) for i in range(0, len(rows), size)]


def _microbatch(rows: np.ndarray, end_of_document: int, device: torch.device) -> Microbatch:
    host = torch.from_numpy(rows.astype(np.int64))
    tokens, targets = (
        host[:, :-1].clone(),
        host[:, 1:].clone(),
    )  # not contiguous(), which returns a view if there is one row
    positions = document_positions(tokens, end_of_document)
    parts = (tokens, targets, positions, document_starts(positions))
    if device.type == "cuda":
        parts = tuple(part.pin_memory().to(device, non_blocking=True) for part in parts)  # type: ignore[assignment]
    return Microbatch(*parts)


def document_positions(tokens_BT: Tensor, end_of_document: int) -> Tensor:
    """Each token's place in its document, counted from 0; each row starts one.

    The mark that ends a document opens the next: the next document's first token is predicted from it alone. So
    every target is meaningful, no loss is masked, and generation without a prompt starts from the mark.
    """
    index_T = torch.arange(tokens_BT.shape[1])
    starts_BT = torch.where(tokens_BT == end_of_document, index_T, 0).cummax(dim=1).values
    return index_T - starts_BT
