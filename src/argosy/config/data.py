"""The run file's table `data`: what the model reads, how it is prepared from text and filtered, and its cache."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, WithJsonSchema, model_validator

from argosy.config.section import Mark, PositiveSeconds, Section
from argosy.files import expanded


class CacheConfig(Section):
    """The cache of data.sources that are URLs of an object store. All runs of a machine may share one."""

    folder: str = ""
    """Folder of the cache, on a disk of this machine; empty: argosy/data in $XDG_CACHE_HOME, or in ~/.cache."""
    size_gb: PositiveFloat = 50.0
    """Most that the cache holds, in GB (10^9 bytes); less if the disk has less room."""
    timeout_s: PositiveSeconds = 600.0
    """Longest wait of a step for a store that does not answer, before the run ends."""

    @property
    def path(self) -> Path:
        """The folder in use: `folder`, or the default."""
        if self.folder:
            return expanded(self.folder).absolute()
        caches = os.environ.get("XDG_CACHE_HOME", "")
        return (Path(caches) if caches else Path.home() / ".cache") / "argosy" / "data"

    @property
    def size_bytes(self) -> int:
        """`size_gb` in bytes."""
        return int(self.size_gb * 1e9)


Threshold = Annotated[float, Field(ge=0.0, le=1.0)]
Few = Annotated[int, Field(ge=1, le=1000)]


class FiltersConfig(Section):
    """Documents that are left out, before any of them becomes tokens. All but the length and drop_exact need
    argosy[filters]."""

    languages: tuple[str, ...] = ()
    """Languages to keep, by their ISO 639-1 codes (en, de); empty: all."""
    language_score: Threshold = 0.65
    """Least probability of the language that a document seems to be in."""
    min_chars: NonNegativeInt = 0
    """Least length of a document in characters."""
    max_chars: NonNegativeInt = 0
    """Largest length of a document in characters; 0: any."""
    repetition: bool = False
    """Leave out documents that repeat lines, paragraphs or n-grams (Rae et al. 2021, Gopher, table A1)."""
    quality: bool = False
    """Leave out what is not prose in English: word count and length, symbols, stop words (Gopher, appendix A)."""
    blocked_urls: str = ""
    """A file with a domain or a URL on each line, whose documents are left out; datatrove: the lists that it has."""
    url_field: str = "url"
    """Field of a JSONL record, or column of a Parquet file, with the document's URL; read if blocked_urls is given."""
    blocked_words: Path | None = None
    """A file with a word or phrase on each line; documents with one of them are left out."""
    duplicates: Literal["keep", "drop_exact", "drop_near"] = "keep"
    """Leave out a document if the same (drop_exact), or one much like it (drop_near, MinHash), came before it."""
    ngram: Few = 5
    """drop_near: words of an n-gram; documents are alike if they share n-grams."""
    buckets: Few = 14
    """drop_near: buckets of the signature; two documents are alike if one bucket is the same."""
    bucket_hashes: Few = 8
    """drop_near: hashes of a bucket. Of pairs with similarity s, the share 1 - (1 - s^bucket_hashes)^buckets is found:
    92 % at 0.8, 56 % at 0.7, as it is."""


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Objective = Literal["pretrain", "sft", "dpo", "ipo", "simpo", "orpo", "kto", "reward"]
"""The training objectives. All but pretrain learn from conversations."""

TokenizerEngine = Literal["huggingface", "fastokens"]
LONGEST_ROW = 20_000_000
"""Tokens: rows of batches are made whole in memory. The longest contexts of published models have 10 million."""
RowKind = Literal["conversations", "pairs", "judged"]
KIND_OF: dict[str, RowKind] = {"sft": "conversations", "kto": "judged"}
"""Objective -> what its rows hold, if not preference pairs."""


def row_kind(objective: str) -> RowKind:
    """Return what the rows of an objective hold that learns from conversations."""
    return KIND_OF.get(objective, "pairs")


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
    """A tokenizer.json to use, or a run or prepared data that have one; without it a byte-level BPE is trained on the
    input."""
    vocab_size: Annotated[int, Field(gt=0, le=1_000_000)] = 4096
    """Size of the BPE that is trained when no tokenizer is given."""
    field: Annotated[
        tuple[str, ...],
        BeforeValidator(_as_tuple),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
        Mark.REPEATED,
    ] = ("text",)
    """Field of a JSONL record, or column of a Parquet file, that holds the text: one for all of `input`, or one for
    each."""
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
    engine: Literal["auto", TokenizerEngine] = "auto"
    """Tokenizer engine; auto takes fastokens if installed and identical to Hugging Face on a sample."""
    objective: Objective | None = None
    """The objective of the data: pretrain reads text, sft conversations, kto answers that were judged, the others
    pairs of answers (docs/fine-tuning.md). In a run, it is train.objective."""
    seq_len: Annotated[int, Field(ge=0, le=LONGEST_ROW)] = 0
    """Conversations: tokens of the rows that they are packed into; 0: 512. In a run, it is data.seq_len."""
    chat_template: str = ""
    """Conversations: a jinja file, or chatml; empty: the template that comes with the tokenizer."""
    filters: FiltersConfig = FiltersConfig()
    """Filters for documents that are left out."""

    @property
    def has_conversations(self) -> bool:
        """True if the input is conversations, not text."""
        return self.objective not in (None, "pretrain")

    @model_validator(mode="after")
    def _fits_conversations(self) -> Self:
        if not self.has_conversations:
            return self
        if self.max_text_bytes is not None:
            raise ValueError("max_text_bytes would cut a conversation anywhere; leave it out, or give fewer files")
        duplicates = self.filters.duplicates
        if duplicates == "drop_near" or self.filters != FiltersConfig(duplicates=duplicates):
            raise ValueError(
                'filters judge text, not conversations; only filters.duplicates = "drop_exact" works on them'
            )
        return self

    @property
    def fields(self) -> tuple[str, ...]:
        return self.field * len(self.input) if len(self.field) == 1 else self.field

    @model_validator(mode="after")
    def _has_a_field_for_each_input(self) -> Self:
        if len(self.field) != 1 and (not self.field or len(self.field) != len(self.input)):
            raise ValueError(
                f"field names {len(self.field)} fields for {len(self.input)} places of input; give one for all, or one "
                "for each, in the same order"
            )
        return self


def by_option(text: str, of_run: bool = False) -> str:
    """Return a message of `prepare` with options of the command line in place of its keys.

    of_run: those of `argosy train`, not of `argosy prepare`.
    """
    places = {"seq_len": "data.seq_len", "objective": "train.objective"}

    def option(key: str) -> str:
        place = places.get(key, f"data.prepare.{key}") if of_run else key
        return f"--{place.replace('_', '-')}"

    keys = "|".join(PrepareConfig.model_fields)
    text = re.sub(r"\binput = ", "", text)
    text = re.sub(rf"(?<![\w.])({keys}) = ", lambda found: f"{option(found[1])} ", text)
    return re.sub(rf"`({keys})`", lambda found: option(found[1]), text)


class DataStage(Section):
    """From `from_step` on, draw from these sources instead."""

    from_step: PositiveInt
    """First step (0-based) of the stage."""
    sources: dict[str, PositiveFloat]
    """Prepared folder -> weight."""


class DataConfig(Section):
    """The data that the model reads."""

    seq_len: Annotated[int, Field(gt=0, le=LONGEST_ROW)] = 512
    """Sequence length (context length): tokens per sample."""
    sources: dict[str, PositiveFloat] = {}
    """Datasets: prepared folder, or its URL in an object store (s3://bucket/folder), -> weight; weights are scaled to
    add up to 1. Empty: `prepare.out`."""
    stages: Annotated[tuple[DataStage, ...], Mark.NO_OPTION] = ()
    """Mixtures that replace `sources` from a given step on."""
    on_bad_shard: Literal["stop", "skip"] = "stop"
    """A token shard is cut off, does not match its checksum or has tokens outside of the vocabulary. stop: the run
    ends; skip: it goes on, with other samples of the same source in place of those from the shard."""
    cache: CacheConfig = CacheConfig()
    prepare: PrepareConfig = PrepareConfig()
    """If its `input` is given, the run first prepares the data, once."""

    @property
    def folders(self) -> list[str]:
        """Prepared folders that any mixture names: those of `sources`, then those that only stages name."""
        return list(
            dict.fromkeys(name for names in (self.sources, *(stage.sources for stage in self.stages)) for name in names)
        )
