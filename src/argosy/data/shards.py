"""Token shards in Megatron-LM's layout: `NAME.bin` holds the tokens, `NAME.idx` says where documents lie.

The index, little-endian, after Megatron-LM's `core/datasets/indexed_dataset.py`:

    9 bytes   magic              MMIDIDX 0 0
    uint64    version            1
    uint8     dtype code         see DTYPE_CODES
    uint64    sequence count     S
    uint64    document count     D, which counts the leading zero of the document indices
    int32     lengths [S]        tokens of each sequence
    int64     pointers [S]       byte offset of each sequence in NAME.bin
    int64     documents [D]      first sequence of each document, then S

Here one document is one sequence that ends in the end-of-document token (Megatron's --append-eod). Shards of
Megatron-LM and datatrove, where a document may have several sequences, can be read too.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from argosy.data.checksum import BLOCK_BYTES, BlockChecksums, read_checksums
from argosy.data.manifest import Shard
from argosy.errors import DataError, UserError
from argosy.files import PartialFile, atomic_write, file_sha256, open_regular

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Megatron's codes of the integer dtypes. 6 and 7 are floating-point and hold no tokens."""

Tokens = npt.NDArray[Any]
"""A one-dimensional integer array of token ids."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return uint16 below 65,500 tokens, else int32; the threshold is Megatron's."""
    return np.dtype("<u2" if vocab_size < 65_500 else "<i4")


def dtype_code(dtype: np.dtype[Any]) -> int:
    """Return Megatron's code of a dtype in DTYPE_CODES."""
    return next(code for code, name in DTYPE_CODES.items() if np.dtype(name) == dtype)


class ShardWriter:
    """Writes `NAME.bin`, `NAME.idx` and `NAME.crc32`. They get their final names in `close`."""

    def __init__(self, prefix: Path, dtype: np.dtype[Any]):
        self._prefix, self._dtype = prefix, dtype
        self._bin = PartialFile(_with(prefix, ".bin"))
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._sha256, self._checksums = hashlib.sha256(), BlockChecksums()

    def write(self, tokens: Tokens, lengths: npt.NDArray[np.int64]) -> None:
        """Append whole documents, laid end to end; document i has `lengths[i]` tokens, its end included."""
        if lengths.max() > np.iinfo(np.int32).max:
            raise UserError(
                f"a document of {lengths.max()} tokens is longer than the .idx format can say (2^31 - 1). "
                "Cut the text into smaller files."
            )
        data = np.ascontiguousarray(tokens, self._dtype).data.cast("B")
        self._bin.file.write(data)
        self._sha256.update(data)
        self._checksums.update(data)
        self._lengths.append(lengths.astype(np.int32))

    def close(self, text_bytes: int) -> Shard:
        """Sync the files to disk and give them their names, the .bin last. `text_bytes`: size of their text."""
        lengths = np.concatenate(self._lengths)
        self._checksums.write(_with(self._prefix, ".crc32"))
        write_index(_with(self._prefix, ".idx"), lengths, self._dtype)
        self._bin.commit()
        return Shard(
            name=self._prefix.name,
            tokens=int(lengths.sum(dtype=np.int64)),
            documents=len(lengths),
            text_bytes=text_bytes,
            idx_bytes=_with(self._prefix, ".idx").stat().st_size,
            bin_sha256=self._sha256.hexdigest(),
            idx_sha256=file_sha256(_with(self._prefix, ".idx")),
        )

    def abandon(self) -> None:
        """Close and remove the files written so far."""
        self._bin.abandon()


def write_index(path: Path, lengths: npt.NDArray[np.int32], dtype: np.dtype[Any]) -> None:
    """Write the .idx of documents that have one sequence each and are laid end to end."""
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    pointers = np.concatenate(([0], ends))[: len(lengths)]
    with atomic_write(path) as file:
        file.write(HEADER.pack(MAGIC, 1, dtype_code(dtype), len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write(pointers.astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())


@dataclass(frozen=True)
class ShardIndex:
    """The contents of an .idx file."""

    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]
    """Tokens of each sequence."""
    documents: npt.NDArray[np.int64]
    """First sequence of each document, then the number of sequences."""

    @property
    def tokens(self) -> int:
        """Tokens in the .bin."""
        return int(self.lengths.sum(dtype=np.int64))

    @classmethod
    def read(cls, path: Path) -> ShardIndex:
        """Read an .idx. Raises: UserError if `path` is no Megatron index, or its .bin has another length."""
        try:
            with open_regular(path) as file:
                data = file.read()
        except OSError as problem:
            raise UserError(f"{path}: cannot be read ({problem.strerror}). Restore the file.") from None
        if len(data) < HEADER.size or data[: len(MAGIC)] != MAGIC:
            raise UserError(
                f"{path}: not an index of Megatron token shards (it must begin with MMIDIDX). "
                "Restore the file, or prepare the data again: argosy prepare"
            )
        _, version, code, sequences, documents = HEADER.unpack_from(data)
        whole = HEADER.size + sequences * 12 + documents * 8
        if version != 1 or code not in DTYPE_CODES or len(data) < whole:
            raise UserError(
                f"{path}: version {version}, dtype code {code}, {len(data)} bytes; expected version 1, one of the "
                f"codes {sorted(DTYPE_CODES)}, {whole} bytes. Restore the file, or prepare the data again: "
                "argosy prepare"
            )
        index = cls(
            dtype=np.dtype(DTYPE_CODES[code]),
            lengths=np.frombuffer(data, "<i4", sequences, HEADER.size),
            documents=np.frombuffer(data, "<i8", documents, HEADER.size + sequences * 12),
        )
        index._check_length(path.with_suffix(".bin"))
        return index

    def _check_length(self, bin_path: Path) -> None:
        if len(self.lengths) and self.lengths.min() < 0:
            raise UserError(
                f"{bin_path.with_suffix('.idx')}: a sequence of {self.lengths.min()} tokens. Restore the file, or "
                "prepare the data again: argosy prepare"
            )
        size = bin_path.stat().st_size if bin_path.exists() else 0
        if size != self.tokens * self.dtype.itemsize:
            raise UserError(
                f"{bin_path}: {size} bytes, but its .idx says {self.tokens * self.dtype.itemsize}. "
                "Restore the file, or prepare the data again: argosy prepare"
            )


class ShardReader:
    """The tokens of one shard, memory-mapped. Each block is checked when it is first used."""

    def __init__(self, bin_path: Path, dtype: np.dtype[Any], vocab_size: int):
        self._path, self._vocab_size = bin_path, vocab_size
        self._tokens = _map(bin_path, dtype)
        self._block_tokens = BLOCK_BYTES // dtype.itemsize
        self._checksums = read_checksums(bin_path.with_suffix(".crc32"))
        blocks = -(-len(self._tokens) // self._block_tokens)
        self._checked, self._unchecked = bytearray(blocks), blocks
        if self._checksums is not None and len(self._checksums) != blocks:
            raise DataError(
                f"{bin_path.with_suffix('.crc32')}: {len(self._checksums)} checksums for {blocks} blocks. "
                "Restore the file, or prepare the data again: argosy prepare"
            )

    def __len__(self) -> int:
        return len(self._tokens)

    def tokens(self, start: int, stop: int) -> Tokens:
        """Return tokens `start` to `stop` of the shard, as a view of the file.

        Raises: DataError if one of their blocks does not match its checksum, or holds an id outside the vocabulary.
        """
        if self._unchecked:
            for block in range(start // self._block_tokens, -(-stop // self._block_tokens)):
                self._check(block)
        return self._tokens[start:stop]

    def _check(self, block: int) -> None:
        if self._checked[block]:
            return
        tokens = self._tokens[block * self._block_tokens : (block + 1) * self._block_tokens]
        where = f"{self._path}: the block at byte {block * BLOCK_BYTES}"
        if self._checksums is not None:
            found, expected = zlib.crc32(tokens.data.cast("B")), int(self._checksums[block])
            if found != expected:
                raise DataError(
                    f"{where} does not match its checksum (expected {expected:08x}, found {found:08x}): the file "
                    "was changed or the disk is failing. Restore the file, or prepare the data again: argosy prepare"
                )
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocab_size:
            raise DataError(
                f"{where} holds token {low if low < 0 else high}, but the vocabulary has {self._vocab_size} tokens. "
                "The shard was made with another tokenizer: prepare the data again with this one."
            )
        self._checked[block] = 1
        self._unchecked -= 1


def _map(path: Path, dtype: np.dtype[Any]) -> Tokens:
    """Map the tokens of a .bin into memory, as a plain array: its slices are cheaper than those of a memmap."""
    return np.memmap(path, dtype, mode="r").view(np.ndarray) if path.stat().st_size else np.empty(0, dtype)


def _with(prefix: Path, suffix: str) -> Path:
    """Return `prefix` + `suffix`. Path.with_suffix would cut the end of a name such as `train-0.5`."""
    return prefix.with_name(prefix.name + suffix)
