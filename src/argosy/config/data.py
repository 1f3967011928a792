"""The run file's table `data`: what the model reads, and how it is prepared from text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from argosy.config.cache import CacheConfig
from argosy.config.filters import FiltersConfig
from argosy.config.section import Section


class PrepareConfig(Section):
    """Text in, token shards out; the same keys are the options of `argosy prepare`."""

    input: tuple[str, ...] = ()
    """Text to train on: files, folders, globs, URLs, or builtin:python; .txt .md .py ... .jsonl .parquet, also
    .gz/.zst."""
    extensions: tuple[str, ...] = ()
    """File extensions that folders and globs are searched for as well, beside the known ones: .log; * reads every
    file."""
    out: Path = Path("data/prepared")
    """Folder for the shards and their manifest."""
    remote: str = ""
    """URL of a folder in an object store, e.g. s3://bucket/web, to which the prepared data are copied, their manifest
    last; data.sources may name it."""
    tokenizer: Path | None = None
    """A tokenizer.json to use; without one a byte-level BPE is trained on the input."""
    vocab_size: PositiveInt = 4096
    """Size of the BPE that is trained when no tokenizer is given."""
    field: str = "text"
    """Field of a JSONL record, or column of a Parquet file, that holds the text."""
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.01
    """Share of the documents held out for evaluation, chosen by a hash of their text."""
    max_text_bytes: PositiveInt | None = None
    """Stop after this much text (UTF-8 bytes)."""
    max_document_bytes: PositiveInt = 256 * 2**20
    """Longest document (JSONL line, Parquet value, file of text that is compressed or whose size the server does not
    say) that is read into memory; a longer one is an error, as a small file may unpack to any size."""
    shard_tokens: PositiveInt = 100_000_000
    """Tokens per shard file."""
    on_bad_input: Literal["skip", "refuse"] = "skip"
    """Broken UTF-8, a broken record or one without `field`: skip and count it, or stop."""
    processes: NonNegativeInt = 0
    """Worker processes, which read and tokenize; 0 takes one per core."""
    engine: Literal["auto", "huggingface", "fastokens"] = "auto"
    """Tokenizer engine; auto takes fastokens if installed and identical to Hugging Face on a sample."""
    filters: FiltersConfig = FiltersConfig()
    """Which documents are left out."""


class DataStage(Section):
    """From `from_step` on, draw from these sources instead."""

    from_step: PositiveInt
    """First step (0-based) of the stage."""
    sources: dict[str, PositiveFloat]
    """Prepared folder -> weight."""


class DataConfig(Section):
    """What the model reads."""

    seq_len: PositiveInt = 512
    """Sequence length (context length): tokens per sample."""
    sources: dict[str, PositiveFloat] = {}
    """Datasets: prepared folder, or its URL in an object store (s3://bucket/folder), -> weight; weights are scaled to
    add up to 1. Empty: `prepare.out`."""
    stages: Annotated[tuple[DataStage, ...], tyro.conf.Suppress] = ()
    """Mixtures that replace `sources` from a given step on."""
    on_bad_shard: Literal["stop", "skip"] = "stop"
    """A token shard is cut off, does not match its checksum or has tokens outside of the vocabulary. stop: the run
    ends; skip: it goes on, with other samples of the same source in place of those from the shard."""
    cache: CacheConfig = CacheConfig()
    prepare: PrepareConfig = PrepareConfig()
    """If its `input` is given, the run first prepares the data, once."""
