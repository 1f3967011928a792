"""The files that make a folder prepared: `manifest.json`, which is written last, and the checksums of its shards.

The sidecar `NAME.crc32` has one CRC-32 for each block of `NAME.bin`, little-endian uint32 after uint32. Checking a
checksum of the whole file would take a full read before the first step. With one for each block, a block is read when
it is first used, and a flipped byte is still found before its tokens reach the model.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import zlib
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from argosy.config.data import Objective, PrepareConfig, RowKind, row_kind
from argosy.data.packing import ID_BITS
from argosy.errors import DataError, UserError, counted, first_error
from argosy.files import atomic_write, file_sha256, is_plain_name, read_at_most

DATA_MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
"""The chat template that conversations were written with."""
CUTTING_JOURNAL = "prepare.journal"
"""The file of a folder that is being prepared."""
BEGIN_OPTION = "begin"
"""Option: the tokens that each document begins with."""

PREPARE_SETTINGS = (
    *("vocab_size", "field", "validation_fraction", "max_text_bytes", "shard_tokens", "on_bad_input"),
    *("extensions", "seq_len"),
)
"""Options of `prepare` that the manifest knows by their values."""

SplitName = Literal["train", "validation"]
SHARD_FILES = (".bin", ".idx", ".crc32")
"""Ends of the names of a shard's files: tokens, documents, checksums."""

NAMES_KEPT = 100
"""Names of files left out that the manifest keeps."""
NAMES_IN_WORDS = 3

MOST_MANIFEST_BYTES = 256 * 2**20
"""No manifest is larger: that of 100,000 shards has 35 MB."""


def _plain(name: str) -> str:
    if not is_plain_name(name):
        raise ValueError(f"{name[:60]!r} is not the name of a file in this folder")
    return name


Count = Annotated[int, Field(ge=0, le=2**60)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Shard(_Record):
    """A `NAME.bin` with its `NAME.idx`."""

    name: Annotated[str, AfterValidator(_plain)]
    tokens: Count
    documents: Count
    text_bytes: Count
    """UTF-8 bytes of the text that the tokens stand for; see `Manifest.text_bytes_estimated`."""
    idx_bytes: Count
    bin_sha256: Sha256
    idx_sha256: Sha256


ROW_NAMES: dict[RowKind, str] = {"conversations": "conversation", "pairs": "pair", "judged": "judged answer"}
"""Kind of a row -> the name of one of the things that it holds."""


class RowFormat(_Record):
    """Rows of conversations (`data.packing`), in place of text that is laid end to end."""

    seq_len: Annotated[int, Field(ge=2, le=2**31)]
    """Tokens of a row."""
    kind: RowKind


class Manifest(_Record):
    """The contents of a prepared folder, and how it was made."""

    format: Literal[1] = 1
    tokenizer_sha256: Sha256
    """SHA-256 of `tokenizer.json`, of which the folder has a copy."""
    vocab_size: Annotated[int, Field(ge=1, le=2**31)]
    eod_id: Count
    """The token that ends every document."""
    dtype: Annotated[str, Field(pattern="^(u?int(8|16)|int(32|64))$")]
    """NumPy name of the tokens' dtype in the .bin files."""
    options: dict[str, Any] = {}
    """The options of `prepare` on which the result depends; empty for adopted shards."""
    skipped: dict[str, Count] = {}
    """Input that was skipped: kind -> count."""
    skipped_at: dict[str, tuple[str, ...]] = {}
    """Kind -> where the first of it is: file and line."""
    dropped: dict[str, Count] = {}
    """Documents that filters left out: why -> count."""
    files: Count | None = None
    """Input files that were read; None if that was not counted."""
    files_after_limit: Count = 0
    """Files that were not read since max_text_bytes was reached."""
    left_out: Count = 0
    """Files of the input's folders and globs that were not read, since their extension is not known."""
    left_out_names: tuple[str, ...] = ()
    """The first of them."""
    other_splits: Count = 0
    """Files of data sets that were not read, since they are of another split than train."""
    text_bytes_estimated: bool = False
    """True if text_bytes were estimated from a decoded sample (adopted shards), not counted."""
    truncated: Count = 0
    """Conversations whose last turns were left out, as a row holds no more."""
    rows: RowFormat | None = None
    """None: text."""
    splits: dict[SplitName, tuple[Shard, ...]]

    @model_validator(mode="after")
    def _check_whole(self) -> Self:
        if self.eod_id >= self.vocab_size:
            raise ValueError(f"eod_id = {self.eod_id} is outside of the vocabulary of {self.vocab_size} tokens")
        names = sorted(shard.name for shard in self.shards())
        if self.rows is not None and (self.vocab_size > 2**ID_BITS or self.dtype != "int32"):
            raise ValueError(f"rows of conversations are int32, with ids of {ID_BITS} bits")
        if twice := next((name for name, after in pairwise(names) if name == after), None):
            raise ValueError(f"splits name {twice!r} twice")
        return self

    def tokens(self, split: SplitName) -> int:
        """Count the tokens in a split, ends of documents included."""
        return sum(shard.tokens for shard in self.splits.get(split, ()))

    def documents(self, split: SplitName) -> int:
        return sum(shard.documents for shard in self.splits.get(split, ()))

    def text_bytes(self, split: SplitName) -> int:
        """Count the UTF-8 bytes of text in a split."""
        return sum(shard.text_bytes for shard in self.splits.get(split, ()))

    def in_words(self, option: str = "--extensions") -> str:
        """Return what was made of the input: documents, files that were left out, what was skipped; "" if unknown.

        A line; more, indented, for places of what was skipped.
        option: the command's, that reads files of other extensions.
        """
        if self.files is None:
            return ""
        documents = sum(self.documents(split) for split in self.splits)
        what = "document" if self.rows is None else ROW_NAMES[self.rows.kind]
        parts = [f"{counted(documents, what)} from {counted(self.files, 'file')}"]
        if self.rows is not None:
            words = sum(self.tokens(split) for split in self.splits)
            parts.append(f"packed into {counted(words // self.rows.seq_len, 'row')} of {self.rows.seq_len} tokens")
        if self.truncated:
            parts.append(f"{counted(self.truncated, what)} cut after an earlier answer, to fit")
        if self.files_after_limit:
            parts.append(f"{counted(self.files_after_limit, 'file')} not read: max_text_bytes is reached")
        if self.left_out:
            names = [Path(name).name for name in self.left_out_names[:NAMES_IN_WORDS]]
            names += ["..."] if self.left_out > len(names) else []
            why = f" (no known extension: `{option} '*'` reads them)" if self.rows is None else ""
            parts.append(f"{counted(self.left_out, 'file')} left out: {', '.join(names)}{why}")
        if self.other_splits:
            parts.append(f"{counted(self.other_splits, 'file')} of other splits than train not read")
        for verb, counts in (("skipped", self.skipped), ("dropped", self.dropped)):
            kinds = Counter[str]()
            for why, count in counts.items():
                kinds[why.partition(":")[0]] += count
            if kinds:
                listed = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))
                parts.append(f"{counted(kinds.total(), what)} {verb}: {listed}")
        places = [f"\n  {where}: {kind}" for kind, found in sorted(self.skipped_at.items()) for where in found]
        return "; ".join(parts) + "".join(places)

    @property
    def identity(self) -> str:
        """Sixteen hexadecimal digits that change when the tokens or their order in the files change.

        The order of samples depends on these tokens and the seed, so a resumed run compares the digits.
        """
        tokens = {name: [(s.tokens, s.bin_sha256) for s in shards] for name, shards in self.splits.items()}
        text = json.dumps([self.eod_id, self.dtype, tokens], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def save(self, folder: Path) -> None:
        """Write `folder/manifest.json`, whole or not at all."""
        with atomic_write(folder / DATA_MANIFEST) as file:
            file.write(self.model_dump_json(indent=1).encode())

    @classmethod
    def load(cls, folder: Path, check_shards: bool = True) -> Manifest:
        """Read `folder/manifest.json` and check that its files are there and have the right lengths.

        Raises: UserError if there is none, or tokenizer.json is not the one that made the shards; DataError if a shard
        is missing or too short (`check_shards`).
        """
        manifest = cls._parse(folder)
        manifest._check_tokenizer(folder)
        for shard in manifest.shards() if check_shards else ():
            manifest.check_sizes(folder, shard)
        return manifest

    @classmethod
    def _parse(cls, folder: Path) -> Manifest:
        path = folder / DATA_MANIFEST
        try:
            return cls.model_validate_json(read_at_most(path, MOST_MANIFEST_BYTES))
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(
                f"{folder}: no prepared data here ({DATA_MANIFEST} is missing). {_how_to_fill(folder)}"
            ) from None
        except OSError as problem:
            raise UserError(
                f"{path}: cannot be read ({problem.strerror}). Restore it, or get the right to read it."
            ) from None
        except ValidationError as error:
            raise UserError(
                f"{path}: {first_error(error)}. It is damaged or of another version: delete {folder} and prepare it "
                f"again: argosy prepare TEXT --out {folder}"
            ) from None

    def shards(self) -> list[Shard]:
        return [shard for shards in self.splits.values() for shard in shards]

    def _check_tokenizer(self, folder: Path) -> None:
        path = folder / TOKENIZER
        if not path.exists():
            raise UserError(f"{path} is missing. Restore it, or prepare again: {self.prepare_command(folder)}")
        if (found := _sha256(path)) != self.tokenizer_sha256:
            raise UserError(
                f"{folder}: manifest of another tokenizer: its shards were made with tokenizer "
                f"{self.tokenizer_sha256[:12]}, but {TOKENIZER} is {found[:12]}. Restore {path}, or delete {folder} "
                f"and prepare it again: {self.prepare_command(folder)}"
            )

    def prepare_command(self, folder: Path) -> str:
        """Return the command that prepares the same folder, as far as the manifest tells."""
        defaults = PrepareConfig()
        words = list(self.options.get("input", ())) or ["TEXT"]
        if self.rows is not None:
            words += ["--objective", next(name for name in get_args(Objective)[1:] if row_kind(name) == self.rows.kind)]
        for key in PREPARE_SETTINGS:
            value = self.options.get(key)
            for each in value if isinstance(value, list) else [value]:
                if each is not None and getattr(defaults, key) not in (value, (value,)):
                    words += [f"--{key.replace('_', '-')}", str(each)]
        for key, value in (self.options.get("filters") or {}).items():
            if key != "lists":
                words += [
                    f"--filters.{key.replace('_', '-')}",
                    *map(str, value if isinstance(value, list) else [value]),
                ]
        if self.options.get("tokenizer"):
            words += ["--tokenizer", "tokenizer.json"]
        return f"argosy prepare {shlex.join([*words, '--out', str(folder)])}"

    def check_sizes(self, folder: Path, shard: Shard) -> None:
        """Raise DataError if a file of `shard` is missing, or its length has changed."""
        sizes = {".bin": shard.tokens * np.dtype(self.dtype).itemsize, ".idx": shard.idx_bytes}
        for suffix, size in sizes.items():
            path = folder / (shard.name + suffix)
            found = path.stat().st_size if path.exists() else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes instead of {size}"
                raise DataError(
                    f"{path} {state}. Restore the file, or delete {folder} and prepare it again: "
                    f"{self.prepare_command(folder)}"
                )


def verify(folder: Path) -> Manifest:
    """Hash every file of a prepared folder again and return its manifest.

    Raises: DataError that names the first file that differs from the manifest; UserError as `Manifest.load`.
    """
    manifest = Manifest.load(folder)
    for shard in manifest.shards():
        for suffix, expected in ((".bin", shard.bin_sha256), (".idx", shard.idx_sha256)):
            path = folder / (shard.name + suffix)
            if (found := _sha256(path)) != expected:
                raise DataError(
                    f"{path} does not match its checksum (manifest {expected[:12]}, file {found[:12]}). Restore the "
                    f"file, or delete {folder} and prepare it again: {manifest.prepare_command(folder)}"
                )
        bin_path = folder / f"{shard.name}.bin"
        sidecar = bin_path.with_suffix(".crc32")
        if sidecar.is_file() and sidecar.read_bytes() != block_checksums(bin_path).to_bytes():
            raise DataError(
                f"{sidecar} has other checksums than {bin_path.name}, which is as it was written. Restore the file."
            )
    return manifest


def _sha256(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError as problem:
        raise DataError(f"{path} cannot be read ({problem.strerror}). Restore the file.") from None


def _how_to_fill(folder: Path) -> str:
    if any(folder.glob("*.idx")):
        return (
            "If preparing was interrupted, repeat the command, and it goes on. Shards of another program are taken "
            f"over with: argosy prepare {folder} --adopt --tokenizer tokenizer.json"
        )
    return f"Prepare it: argosy prepare TEXT --out {folder}"


CHECKSUM_BLOCK_BYTES = 256 * 1024
"""Bytes of .bin under one checksum: large enough for one efficient read, small enough to check in no time."""


class BlockChecksums:
    """Computes the checksums of a stream of bytes that arrives in pieces of any size."""

    def __init__(self) -> None:
        self._finished: list[int] = []
        self._crc, self._room = 0, CHECKSUM_BLOCK_BYTES

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes of the stream."""
        view = memoryview(data)
        while view:
            head, view = view[: self._room], view[self._room :]
            self._crc = zlib.crc32(head, self._crc)
            self._room -= len(head)
            if not self._room:
                self._close_block()

    def to_bytes(self) -> bytes:
        """End the stream and return the checksums of all blocks, including the last, shorter one."""
        if self._room < CHECKSUM_BLOCK_BYTES:
            self._close_block()
        return np.array(self._finished, "<u4").tobytes()

    def write(self, path: Path) -> None:
        """End the stream and write its checksums to `path`."""
        with atomic_write(path) as file:
            file.write(self.to_bytes())

    def _close_block(self) -> None:
        self._finished.append(self._crc)
        self._crc, self._room = 0, CHECKSUM_BLOCK_BYTES


def block_checksums(bin_path: Path) -> BlockChecksums:
    """Return the checksums of a .bin as it is."""
    checksums = BlockChecksums()
    with bin_path.open("rb") as file:
        while block := file.read(CHECKSUM_BLOCK_BYTES):
            checksums.update(block)
    return checksums


def write_checksums(bin_path: Path) -> None:
    """Write the sidecar of a .bin."""
    block_checksums(bin_path).write(bin_path.with_suffix(".crc32"))


def read_checksums(path: Path) -> npt.NDArray[np.uint32] | None:
    """Return the checksums in `path`, or None if there is no such file (shards of other programs)."""
    return np.fromfile(path, "<u4") if path.is_file() else None
