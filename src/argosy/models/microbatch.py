"""Microbatches: what goes through the model at once, cut from rows of token ids."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from argosy.accelerator import sent_to
from argosy.config.schema import RunConfig
from argosy.data.packing import CHOSEN_SIDE, IGNORED, REJECTED_SIDE, is_packed, sequences_in, unpack
from argosy.models.attention import Documents
from argosy.models.dropout import mask_keys
from argosy.models.preference import Sequences

# B batch, T tokens, n modules of multi-token prediction


@dataclass(frozen=True)
class Microbatch:
    """The rows that go through the model at once. They are whole; each rank takes its part of them by the layout."""

    tokens_BT: Tensor
    targets_BT: Tensor
    """The token after each token."""
    positions_BT: Tensor
    """Each token's place in its document."""
    documents: Documents
    """The documents of the rows."""
    counted: int
    """Targets that count, known without waiting for the device; of preferences, those of chosen answers."""
    sequences: Sequences | None = None
    """The sequences that preferences compare."""
    answers: int = 0
    """Pairs, or answers that were judged."""
    further_BTn2: Tensor | None = None
    """Inputs and targets of multi-token prediction (`mtp.further_tokens`), where it is trained."""
    mask_keys_BT: Tensor | None = None
    """The numbers that `lora.dropout` draws from (`dropout.mask_keys`), of whole rows."""

    def extras(self) -> dict[str, Tensor | Sequences]:
        """Return what only some runs have, by the keywords of `Decoder.forward`."""
        some = {"sequences": self.sequences, "further_BTn2": self.further_BTn2, "mask_keys_BT": self.mask_keys_BT}
        return {name: value for name, value in some.items() if value is not None}


def microbatches(rows: np.ndarray, size: int, end_of_document: int, device: torch.device) -> list[Microbatch]:
    """Cut rows (int32 [n, T+1]) into microbatches of `size` rows.

    Rows are overlapping windows of the token stream, or whole conversations, which say themselves what of them is
    learned. A microbatch may have both, if a mixture has; each row is what its first word says.
    """
    return [_microbatch(rows[i : i + size], end_of_document, device) for i in range(0, len(rows), size)]


def _microbatch(rows: np.ndarray, end_of_document: int, device: torch.device) -> Microbatch:
    of_chats = np.array([is_packed(row[None]) for row in rows], bool)
    if not of_chats.any():
        return microbatch_of(*_of_text(rows, end_of_document), device)
    tokens, targets, positions = torch.empty(3, len(rows), rows.shape[1] - 1, dtype=torch.int64)
    kinds = [(of_chats, map(_tensor, unpack(rows[of_chats]))), (~of_chats, _of_text(rows[~of_chats], end_of_document))]
    for are_such, found in kinds:
        chosen = torch.from_numpy(are_such)
        tokens[chosen], targets[chosen], positions[chosen] = found
    return microbatch_of(tokens, targets, positions, device)


def _of_text(rows: np.ndarray, end_of_document: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, targets and positions."""
    host = torch.from_numpy(rows.astype(np.int64))
    tokens, targets = host[:, :-1].clone(), host[:, 1:].clone()  # contiguous() returns a view if there is one row
    return tokens, targets, document_positions(tokens, end_of_document)


def microbatch_of(
    tokens_BT: Tensor,
    targets_BT: Tensor,
    positions_BT: Tensor,
    device: torch.device,
    sequences: Sequences | None = None,
) -> Microbatch:
    """Return the microbatch of these rows, int64 in host memory, on `device`."""
    counted = int((targets_BT != IGNORED).sum())
    documents = Documents.of(positions_BT)
    tokens_BT, targets_BT, positions_BT, starts = (
        sent_to(device, part) for part in (tokens_BT, targets_BT, positions_BT, documents.starts)
    )
    sequences = sequences and Sequences(*(sent_to(device, part) for part in sequences))
    return Microbatch(tokens_BT, targets_BT, positions_BT, Documents(starts, documents.on_host), counted, sequences)


def document_positions(tokens_BT: Tensor, end_of_document: int) -> Tensor:
    """Each token's place in its document, counted from 0; each row starts one.

    The mark that ends a document opens the next: the next document's first token is predicted from it alone. So
    every target is meaningful, no loss is masked, and generation without a prompt starts from the mark.
    """
    index_T = torch.arange(tokens_BT.shape[1])
    starts_BT = torch.where(tokens_BT == end_of_document, index_T, 0).cummax(dim=1).values
    return index_T - starts_BT


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
    is_chosen = found.kinds == CHOSEN_SIDE
    answers = is_chosen | (found.kinds == REJECTED_SIDE) if is_judged else is_chosen
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
