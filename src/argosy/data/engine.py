"""Tokenizing in bulk: Hugging Face tokenizers, or fastokens where it gives the same ids."""

from __future__ import annotations

import hashlib
import importlib.util
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from argosy.data.tokenizer import Tokenizer
from argosy.errors import ArgosyWarning, missing_extra

EngineName = Literal["huggingface", "fastokens"]
Ragged = tuple[npt.NDArray[Any], npt.NDArray[np.int64]]
"""The ids of all texts end to end, and the number of ids of each."""


@dataclass(frozen=True)
class EncodedBatch:
    """Documents as tokens, each followed by the end-of-document token."""

    tokens: npt.NDArray[Any]
    """Tokens of all documents, end to end."""
    lengths: npt.NDArray[np.int64]
    """Number of tokens of each document, its end included."""
    text_bytes: npt.NDArray[np.int64]
    """UTF-8 bytes of each document."""
    held_out: npt.NDArray[np.bool_]
    """True for each document in the validation split."""

    def before(self, count: int) -> EncodedBatch:
        """Return the first `count` documents."""
        end = int(self.lengths[:count].sum())
        return EncodedBatch(self.tokens[:end], self.lengths[:count], self.text_bytes[:count], self.held_out[:count])

    def after(self, count: int) -> EncodedBatch:
        """Return the documents after the first `count`."""
        if not count:
            return self
        first = int(self.lengths[:count].sum())
        return EncodedBatch(self.tokens[first:], self.lengths[count:], self.text_bytes[count:], self.held_out[count:])


class Encoder:
    """Encodes batches of documents.

    Args:
        tokenizer: a tokenizer.json.
        engine: the tokenizer engine.
        dtype: dtype of the tokens.
        validation_fraction: documents whose hash falls into this share of all hashes are held out.
    """

    def __init__(self, tokenizer: Path, engine: EngineName, dtype: np.dtype[Any], validation_fraction: float):
        self._encode = encode_function(tokenizer, engine)
        self._eod_id = Tokenizer.load(tokenizer).eod_id
        self._dtype, self._threshold = dtype, int(validation_fraction * 2**64)

    def encode(self, texts: Sequence[str]) -> EncodedBatch:
        """Encode `texts`, count them and choose their split."""
        ids, lengths = self._encode(texts)
        raw = [text.encode() for text in texts]
        return EncodedBatch(
            tokens=np.insert(ids, np.cumsum(lengths), self._eod_id).astype(self._dtype),
            lengths=lengths + 1,
            text_bytes=np.array([len(text) for text in raw], np.int64),
            held_out=np.array([self._is_held_out(text) for text in raw], np.bool_),
        )

    def _is_held_out(self, text: bytes) -> bool:
        """Decide by a hash of the text alone, so that copies of a document are never in both splits."""
        digest = hashlib.blake2b(text, digest_size=8).digest()
        return int.from_bytes(digest, "little") < self._threshold


def encode_function(tokenizer: Path, engine: EngineName) -> Callable[[Sequence[str]], Ragged]:
    """Return the function that encodes with `engine`. Raises: UserError if it is fastokens and not installed."""
    return _fastokens(tokenizer) if engine == "fastokens" else _huggingface(tokenizer)


def choose_engine(
    wanted: Literal["auto", "huggingface", "fastokens"], tokenizer: Path, sample: Iterable[str]
) -> EngineName:
    """Return fastokens if it may be used and gives Hugging Face's ids on all of `sample`; else Hugging Face.

    Raises: UserError if fastokens is asked for and not installed. Warns if it gives other ids.
    """
    if wanted == "huggingface" or (wanted == "auto" and importlib.util.find_spec("fastokens") is None):
        return "huggingface"
    if reason := _difference(tokenizer, list(sample)):
        warnings.warn(
            f"engine = {wanted}: fastokens {reason}; going on with huggingface, slower but the reference. "
            "engine = huggingface leaves the comparison out.",
            ArgosyWarning,
            stacklevel=2,
        )
        return "huggingface"
    return "fastokens"


def _difference(tokenizer: Path, sample: Sequence[str]) -> str | None:
    """Return how fastokens differs from Hugging Face on `sample`, or None."""
    reference, lengths = encode_function(tokenizer, "huggingface")(sample)
    fast = encode_function(tokenizer, "fastokens")
    try:
        ids, fast_lengths = fast(sample)
    except Exception as error:  # Hugging Face can do whatever fastokens cannot
        return f"cannot use this tokenizer ({error})"
    same = np.array_equal(lengths, fast_lengths) and np.array_equal(reference, ids)
    return None if same else f"gives other ids on a sample of {len(sample)} texts"


def _huggingface(path: Path) -> Callable[[Sequence[str]], Ragged]:
    tokenizer = Tokenizer.load(path)

    def encode(texts: Sequence[str]) -> Ragged:
        lists = tokenizer.encode_batch(texts)
        lengths = np.array([len(ids) for ids in lists], np.int64)
        return np.fromiter(chain.from_iterable(lists), np.int32, int(lengths.sum())), lengths

    return encode


def _fastokens(path: Path) -> Callable[[Sequence[str]], Ragged]:
    try:
        import fastokens
    except ImportError:
        raise missing_extra("fastokens", "fast-tokenizer", "engine = fastokens") from None
    tokenizer = None

    def encode(texts: Sequence[str]) -> Ragged:
        nonlocal tokenizer
        tokenizer = tokenizer or fastokens.Tokenizer.from_file(str(path))
        ids, offsets = tokenizer.encode_batch_flat(list(texts), add_special_tokens=False, split_special_tokens=True)
        ends = np.frombuffer(offsets, "<i8")
        return np.frombuffer(ids, "<u4"), ends[1:] - ends[:-1]

    return encode
