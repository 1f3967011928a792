"""`tokenizer.json`, the one format of tokenizers, trained here or given."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HuggingFaceTokenizer

from argosy.data.manifest import TOKENIZER
from argosy.errors import UserError
from argosy.files import atomic_write, read_at_most

END_OF_DOCUMENT = "<|endoftext|>"
END_NAMES = (
    END_OF_DOCUMENT,
    "<|end_of_text|>",
    "<|end▁of▁sentence|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|im_end|>",
)
"""Names of the token that ends a document, the likeliest first: GPT-2 and Qwen, Llama 3, DeepSeek, Llama 2 and
Mistral, Gemma, others; a chat model's end of turn only if there is nothing else."""

USAGE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
"""Files beside a Hugging Face folder's tokenizer.json: its special tokens, chat template, how text is generated."""
MOST_BYTES = 512 * 2**20
"""No tokenizer.json is larger: that of 262,000 tokens has 33 MB."""
SMALLEST_VOCABULARY = 256 + 1
"""All bytes and the end of a document."""

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""GPT-4's pattern: words with the space before them, up to three digits, punctuation, runs of white space."""


def tokenizer_file(path: Path) -> Path:
    """Return the tokenizer.json that `path` names: the file, or that of a run, a checkpoint or prepared data."""
    if not path.is_dir():
        return path
    places = [path / TOKENIZER, path.parent.parent / TOKENIZER]
    return next((place for place in places if place.is_file()), places[0])


def usage_of(path: Path) -> dict[str, bytes]:
    """Return the files of `USAGE` that lie beside the tokenizer of `path`, as they are. Raises: UserError, OSError."""
    beside = tokenizer_file(path).parent
    return {name: read_at_most(beside / name, MOST_BYTES) for name in USAGE if (beside / name).is_file()}


def how_to_prepare(tokenizer: Path | str) -> str:
    """Return the command that prepares text with the tokenizer of a file or folder."""
    return f"argosy prepare TEXT --tokenizer {shlex.quote(str(tokenizer))} --out NEW-FOLDER"


class Tokenizer:
    """A loaded tokenizer.json that has a token to end documents.

    Text is always encoded as text: where a document spells out a special token, its characters are encoded, so no
    document can fake its own end.
    """

    def __init__(self, json_text: str, where: str):
        try:
            self._engine = HuggingFaceTokenizer.from_str(json_text)
        except Exception as error:  # the library raises a bare Exception
            raise UserError(
                f"tokenizer = {where}: not a Hugging Face tokenizer.json ({error}). Export the tokenizer with "
                "save_pretrained, or leave the key out to train one."
            ) from None
        self._engine.no_truncation()
        self._engine.no_padding()
        self._engine.encode_special_tokens = True
        self.sha256 = hashlib.sha256(json_text.encode()).hexdigest()
        """SHA-256 of the file."""
        self.eod_id = self._find_end(where)
        """The token that ends a document: the first of END_NAMES that exists."""

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Load `path`, as `tokenizer_file`.

        Raises: UserError if it is missing, no tokenizer.json, or has no token that ends a document.
        """
        path = tokenizer_file(path)
        try:
            return cls(read_at_most(path, MOST_BYTES).decode(), str(path))
        except FileNotFoundError:
            raise UserError(
                f"tokenizer = {path}: there is no such file. Name a tokenizer.json, or leave the key out to train one."
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"tokenizer = {path}: cannot be read ({error}). Name a tokenizer.json file.") from None

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, so that special tokens and gaps between ids count."""
        return max(self._engine.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with nothing added before or after."""
        return self._engine.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, by the library's fastest method, which computes no offsets."""
        return [e.ids for e in self._engine.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens."""
        return self._engine.decode(ids)

    def _find_end(self, where: str) -> int:
        for name in END_NAMES:
            if (token := self._engine.token_to_id(name)) is not None:
                return token
        raise UserError(
            f"tokenizer = {where}: no token ends a document (looked for {' '.join(END_NAMES)}). "
            f"Add {END_OF_DOCUMENT} to its added_tokens, or use another tokenizer."
        )


def train(sample: Iterable[str], vocab_size: int, path: Path) -> Tokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016; bytes: Radford et al. 2019) and write it to `path`.

    The same sample gives the same tokenizer. A sample too small for `vocab_size` merges gives fewer tokens.

    Raises: UserError if `vocab_size` is too small to hold every byte.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(
            f"vocab_size = {vocab_size}: a byte-level BPE needs {SMALLEST_VOCABULARY} at least, 256 bytes and the "
            "end of a document; 4096 suits small models, 32000 to 128000 large ones."
        )
    engine = HuggingFaceTokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    engine.train_from_iterator(sample, trainer)
    json_text = engine.to_str(pretty=True)
    with atomic_write(path) as file:
        file.write(json_text.encode())
    return Tokenizer(json_text, str(path))
