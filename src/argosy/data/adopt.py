"""Adopt token shards that another program wrote (Megatron-LM, datatrove): write a manifest and copy nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from argosy.data.manifest import TOKENIZER, Manifest, Shard, SplitName, block_checksums, write_checksums
from argosy.data.shards import ShardIndex, ShardReader
from argosy.data.tokenizer import Tokenizer, tokenizer_file
from argosy.errors import DataError, UserError
from argosy.files import atomic_write, file_sha256

DECODED_TOKENS = 200_000
"""Tokens of each shard that are decoded to estimate the shard's bytes of text."""


def adopt(folder: Path | str, tokenizer: Path | str) -> Manifest:
    """Give `folder` of foreign .bin/.idx shards a manifest; `tokenizer` is that which made them.

    Shards whose name contains "valid" or ends in "val" are the validation split, all others the train split, in the
    order of their names. Every file is read once, to hash it and to write its block checksums. The bytes of text are
    estimated from a decoded sample of each shard, since decoding everything takes as long as tokenizing.

    Raises: UserError if there are no shards, an index is damaged, or they have several dtypes; DataError if a shard
    does not match block checksums that it has, or holds tokens that the tokenizer does not have.
    """
    folder = Path(folder)
    if not (indices := sorted(folder.glob("*.idx"))):
        raise UserError(f"{folder}: no .idx files here. Name the folder that holds the .bin/.idx pairs to adopt.")
    given = tokenizer_file(Path(tokenizer))
    if not given.exists():
        raise UserError(f"tokenizer = {given}: there is no such file. Name the tokenizer.json that made the shards.")
    mine = Tokenizer.load(given)
    dtypes = {path.name: ShardIndex.read(path).dtype for path in indices}
    if len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{name}: {dtype.name}" for name, dtype in dtypes.items())
        raise UserError(
            f"{folder}: shards of several dtypes ({listed}). Put those of each dtype in a folder of its own."
        )
    splits: dict[SplitName, list[Shard]] = {"train": [], "validation": []}
    for path in indices:
        is_held_out = "valid" in path.stem or path.stem.endswith("val")
        splits["validation" if is_held_out else "train"].append(_describe(path, mine))
    manifest = Manifest(
        tokenizer_sha256=mine.sha256,
        vocab_size=mine.vocab_size,
        eod_id=mine.eod_id,
        dtype=next(iter(dtypes.values())).name,
        text_bytes_estimated=True,
        splits={name: tuple(shards) for name, shards in splits.items()},
    )
    if given.resolve() != (folder / TOKENIZER).resolve():
        with atomic_write(folder / TOKENIZER) as file:
            file.write(given.read_bytes())
    manifest.save(folder)
    return manifest


def _describe(idx_path: Path, tokenizer: Tokenizer) -> Shard:
    bin_path = idx_path.with_suffix(".bin")
    index = ShardIndex.read(idx_path)
    sidecar = bin_path.with_suffix(".crc32")
    if not sidecar.exists():
        write_checksums(bin_path)
    elif block_checksums(bin_path).to_bytes() != sidecar.read_bytes():
        raise DataError(
            f"{bin_path} does not match {sidecar.name}: it was changed or damaged after it was written or adopted. "
            f"Restore it; or, if a program wrote it anew, delete {sidecar} and repeat the command."
        )
    return Shard(
        name=idx_path.stem,
        tokens=index.tokens,
        documents=max(len(index.documents) - 1, 0),
        text_bytes=_estimate_text_bytes(ShardReader(bin_path, index.dtype, tokenizer.vocab_size), tokenizer),
        idx_bytes=idx_path.stat().st_size,
        bin_sha256=file_sha256(bin_path),
        idx_sha256=file_sha256(idx_path),
    )


def _estimate_text_bytes(shard: ShardReader, tokenizer: Tokenizer) -> int:
    sample = shard.tokens(0, min(len(shard), DECODED_TOKENS)).astype(np.int64).tolist()
    if not sample:
        return 0
    return round(len(tokenizer.decode(sample).encode()) / len(sample) * len(shard))
