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
from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from argosy.data.manifest import CHECKSUM_BLOCK_BYTES, BlockChecksums, Manifest, Shard, SplitName, read_checksums
from argosy.data.packing import ID_MASK
from argosy.errors import DataError, UserError
from argosy.files import PartialFile, atomic_write, file_sha256, open_regular

SHARD_MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Megatron's codes of the integer dtypes. 6 and 7 are floating-point and hold no tokens."""

Tokens = npt.NDArray[Any]
"""A one-dimensional integer array of token ids."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return uint16 below 65,500 tokens, else int32; the threshold is Megatron's."""
    return np.dtype("<u2" if vocab_size < 65_500 else "<i4")


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
        self._bin.abandon()


def write_index(path: Path, lengths: npt.NDArray[np.int32], dtype: np.dtype[Any]) -> None:
    """Write the .idx of documents that have one sequence each and are laid end to end."""
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    pointers = np.concatenate(([0], ends))[: len(lengths)]
    code = next(code for code, name in DTYPE_CODES.items() if np.dtype(name) == dtype)
    with atomic_write(path) as file:
        file.write(HEADER.pack(SHARD_MAGIC, 1, code, len(lengths), len(lengths) + 1))
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
        return int(self.lengths.sum(dtype=np.int64))

    @classmethod
    def read(cls, path: Path) -> ShardIndex:
        """Read an .idx. Raises: UserError if `path` is no Megatron index, or its .bin has another length."""
        try:
            with open_regular(path) as file:
                data = file.read()
        except OSError as problem:
            raise UserError(f"{path}: cannot be read ({problem.strerror}). Restore the file.") from None
        if len(data) < HEADER.size or data[: len(SHARD_MAGIC)] != SHARD_MAGIC:
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

    def __init__(self, bin_path: Path, dtype: np.dtype[Any], vocab_size: int, has_marks: bool = False):
        """has_marks: its words are ids with marks (`data.packing`)."""
        self._path, self._vocab_size, self._has_marks = bin_path, vocab_size, has_marks
        self._tokens = _map(bin_path, dtype)
        self._block_tokens = CHECKSUM_BLOCK_BYTES // dtype.itemsize
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
        where = f"{self._path}: the block at byte {block * CHECKSUM_BLOCK_BYTES}"
        if self._checksums is not None:
            found, expected = zlib.crc32(tokens.data.cast("B")), int(self._checksums[block])
            if found != expected:
                raise DataError(
                    f"{where} does not match its checksum (expected {expected:08x}, found {found:08x}): the file "
                    "was changed or the disk is failing. Restore the file, or prepare the data again: argosy prepare"
                )
        check_ids(where, tokens, self._vocab_size, self._has_marks)
        self._checked[block] = 1
        self._unchecked -= 1


def check_ids(where: str, words: Tokens, vocab_size: int, has_marks: bool) -> None:
    """Raise DataError if one of the words, which lie at `where`, is no token of the vocabulary."""
    low, high = range_of_ids(words, has_marks)
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"{where} holds token {low if low < 0 else high}, but the vocabulary has {vocab_size} tokens. The shard "
            "was made with another tokenizer: prepare the data again with this one."
        )


def range_of_ids(words: Tokens, has_marks: bool) -> tuple[int, int]:
    """Return the least and the largest id among words."""
    low = int(words.min())
    return low, int((words & ID_MASK).max() if has_marks else words.max())


def _map(path: Path, dtype: np.dtype[Any]) -> Tokens:
    """Map the tokens of a .bin into memory, as a plain array: its slices are cheaper than those of a memmap."""
    return np.memmap(path, dtype, mode="r").view(np.ndarray) if path.stat().st_size else np.empty(0, dtype)


def _with(prefix: Path, suffix: str) -> Path:
    """Return `prefix` + `suffix`. Path.with_suffix would cut the end of a name such as `train-0.5`."""
    return prefix.with_name(prefix.name + suffix)


I32 = npt.NDArray[np.int32]
Place = tuple[str, int]
"""A shard: its folder, and its number in its split."""

OPEN_SHARDS = 256
"""Memory maps that a source keeps open. Each takes a file descriptor, and a process often has only 1024."""


class BadShard(DataError):
    """A shard is missing, too short, damaged, or made with another vocabulary."""

    def __init__(self, text: str, folder: str, shard: int):
        super().__init__(text)
        self.place: Place = (folder, shard)


class TokenSource:
    """All shards of a split laid end to end. Window w of T tokens is tokens w T to (w + 1) T, and the next one.

    Args:
        folder: a prepared folder.
        split: "train" or "validation".
        check_shards: check all shards now, not each when it is first read.

    Raises: UserError, DataError if the folder is not complete (see `Manifest.load`).
    """

    def __init__(self, folder: Path | str, split: SplitName = "train", check_shards: bool = True):
        self._open_split(Path(folder), str(Path(folder)), Manifest.load(Path(folder), check_shards), split)
        self._reader = lru_cache(OPEN_SHARDS)(self._open)

    def _open_split(self, folder: Path, name: str, manifest: Manifest, split: SplitName) -> None:
        self.folder, self.manifest, self.split = folder, manifest, split
        self.name = name
        """Its name for the user: the folder, or a URL."""
        self._shards = [shard for shard in manifest.splits.get(split, ()) if shard.tokens]
        self._starts = [0, *accumulate(shard.tokens for shard in self._shards)]

    def __len__(self) -> int:
        """Tokens in the split, ends of documents included."""
        return self._starts[-1]

    @property
    def text_bytes_per_token(self) -> float:
        """Mean UTF-8 bytes of text per token; it turns nats per token into bits per byte."""
        return self.manifest.text_bytes(self.split) / max(len(self), 1)

    def held_out(self) -> TokenSource:
        """The validation split of the same folder."""
        return TokenSource(self.folder, "validation", check_shards=False)  # the check was done, or is not wanted

    def windows(self, seq_len: int) -> int:
        """Count the whole windows of `seq_len` tokens and their successors.

        Raises: UserError if there is none, or if conversations were packed into rows of another length.
        """
        if (rows := self.manifest.rows) is not None:
            if rows.seq_len != seq_len:
                raise UserError(
                    f"data.seq_len = {seq_len}: the conversations of {self.name} were packed into rows of "
                    f"{rows.seq_len} tokens. Set data.seq_len = {rows.seq_len}, or prepare them again into another "
                    f"folder: argosy prepare ... --seq-len {seq_len}"
                )
            return len(self) // seq_len  # the last word of a row has no successor that counts
        if (windows := (len(self) - 1) // seq_len) > 0:
            return windows
        remedies = [f"seq_len = {len(self) - 1} or less"] if len(self) > 1 else []
        remedies += ["more text"] if self.split == "train" else ["a larger validation_fraction", "more text"]
        raise UserError(
            f"data.seq_len = {seq_len}: the {self.split} split of {self.name} has only {len(self)} tokens, and a "
            f"sample takes seq_len + 1. Try {', or '.join(remedies)}"
        )

    def tokens(self, start: int, stop: int) -> I32:
        """Return tokens `start` to `stop` of the stream.

        Raises: BadShard if a shard is damaged there, or holds an id outside the vocabulary.
        """
        out = np.empty(max(min(stop, len(self)) - start, 0), np.int32)
        self._copy(start, out)
        return out

    def read_windows(self, windows: npt.NDArray[np.int64], out: I32) -> None:
        """Copy the windows with these numbers into the rows of `out` [len(windows), seq_len + 1]. Raises: BadShard."""
        seq_len = out.shape[1] - 1
        for row, window in enumerate(windows.tolist()):
            self._copy(window * seq_len, out[row])

    def in_shards(self, windows: npt.NDArray[np.int64], seq_len: int, shards: Iterable[int]) -> npt.NDArray[np.bool_]:
        """Return True for each window, of `seq_len` tokens and their successors, that overlaps any of `shards`."""
        starts = windows * seq_len
        inside = np.zeros(windows.shape, bool)
        for shard in shards:
            inside |= (starts < self._starts[shard + 1]) & (starts + seq_len >= self._starts[shard])
        return inside

    def _copy(self, start: int, out: I32) -> None:
        done = 0
        if start + len(out) > len(self):  # after the last row of conversations nothing comes
            out[-1], out = 0, out[:-1]
        while done < len(out):
            shard = bisect_right(self._starts, start + done) - 1
            offset = start + done - self._starts[shard]
            stop = min(offset + len(out) - done, self._starts[shard + 1] - self._starts[shard])
            try:
                out[done : done + stop - offset] = self._tokens(shard, offset, stop)
            except DataError as problem:
                raise BadShard(str(problem), self.name, shard) from None
            done += stop - offset

    def _tokens(self, shard: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Return tokens `start` to `stop` of a shard. Raises: DataError."""
        return self._reader(shard).tokens(start, stop)

    def _open(self, shard: int) -> ShardReader:
        self.manifest.check_sizes(self.folder, self._shards[shard])
        path = self.folder / f"{self._shards[shard].name}.bin"
        has_marks = self.manifest.rows is not None
        return ShardReader(path, np.dtype(self.manifest.dtype), self.manifest.vocab_size, has_marks)


def spread_windows(source: TokenSource, seq_len: int, max_tokens: int, without: Collection[int] = ()) -> I32:
    """Return windows with `max_tokens` in all (at least one), spread evenly over the split; int32 [n, seq_len + 1].

    The same arguments give the same windows. They are spread to be as varied as the whole split. without: shards whose
    windows are left out.

    Raises: UserError if the split is shorter than one window; BadShard.
    """
    windows = source.windows(seq_len)
    n = min(windows, max(max_tokens // seq_len, 1))
    chosen = np.arange(n, dtype=np.int64) * windows // n
    chosen = chosen[~source.in_shards(chosen, seq_len, without)] if without else chosen
    out = np.empty((len(chosen), seq_len + 1), np.int32)
    source.read_windows(chosen, out)
    return out
