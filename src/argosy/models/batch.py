"""From rows of token ids to what the model takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Microbatch:
    """What goes through the model at once: inputs, what comes after each of them, and where documents start."""

    tokens_BT: Tensor
    targets_BT: Tensor
    documents: Tensor


def microbatches(rows: np.ndarray, size: int, end_of_document: int, device: torch.device) -> list[Microbatch]:
    """Cut `rows` (int32 [n, T+1], overlapping windows of the token stream) into microbatches of `size` rows."""
    return [_microbatch(rows[i : i + size], end_of_document, device) for i in range(0, len(rows), size)]


def _microbatch(rows: np.ndarray, end_of_document: int, device: torch.device) -> Microbatch:
    host = torch.from_numpy(rows.astype(np.int64))
    tokens, targets = host[:, :-1], host[:, 1:]
    parts = (tokens.contiguous(), targets.contiguous(), document_starts(tokens, end_of_document))
    if device.type == "cuda":
        parts = tuple(part.pin_memory().to(device, non_blocking=True) for part in parts)  # type: ignore[assignment]
    return Microbatch(*parts)


def document_starts(tokens_BT: Tensor, end_of_document: int) -> Tensor:
    """Where documents start in the rows laid end to end, then B*T (int32); each row starts one.

    The mark that ends a document opens the next: from it alone the next document's first token is predicted, so
    every target is meaningful, no loss is masked, and a prompt-less sample starts from the mark.
    """
    starts_BT = tokens_BT == end_of_document
    starts_BT[:, 0] = True
    positions = starts_BT.flatten().nonzero().flatten()
    return torch.cat((positions, torch.tensor([tokens_BT.numel()]))).to(torch.int32)
