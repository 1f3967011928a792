"""`tokenizer.json`, the one format of tokenizers, trained here or given; and tokenizing in bulk with it.

That is done by Hugging Face's tokenizers, or by fastokens where it gives the same ids.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain, islice, product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HuggingFaceTokenizer

from argosy.config.data import TokenizerEngine
from argosy.data.manifest import TEMPLATE, TOKENIZER
from argosy.data.stores.model_folder import TOOLS_TEMPLATE, is_model_folder, read_beside, with_tools
from argosy.data.stores.store import is_url
from argosy.errors import ArgosyWarning, UserError, imported
from argosy.files import atomic_write, read_at_most

END_OF_DOCUMENT = "<|endoftext|>"
END_NAMES = (
    END_OF_DOCUMENT,
    "<|end_of_text|>",
    "<|end▁of▁sentence|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<EOS_TOKEN>",
    "<seed:eos>",
    "[EOS]",
    "<|im_end|>",
    "<|END_OF_TURN_TOKEN|>",
    "[|endofturn|]",
)
"""Names of the token that ends a document, the likeliest first: GPT-2 and Qwen, Llama 3, DeepSeek, Llama 2 and
Mistral, Gemma, Cohere, Seed, others; a chat model's end of turn only if there is nothing else."""

CARD, BASE_CARD = "README.md", "README-base.md"
"""A model's card; and in a run's folder, the card that came with the weights that it started from."""
USAGE = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("tokenizer.model", TEMPLATE, "chat_template.json", "generation_config.json"),
    *("config.json", "model.safetensors.index.json", BASE_CARD),
)
"""Files of a Hugging Face folder that go with its model from run to run and come out again: the tokenizer's others,
chat template, how text is generated; the model's description, which file has which tensor, and its authors' card."""
MOST_TOKENIZER_BYTES = 512 * 2**20
"""No tokenizer.json is larger: that of 262,000 tokens has 33 MB."""
SMALLEST_VOCABULARY = 256 + 1
"""All bytes and the end of a document."""

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""GPT-4's pattern: words with the space before them, up to three digits, punctuation, runs of white space."""

PART_CHARS, PARTS_AT_ONCE = 100_000, 5
"""Characters of the parts of a longer text, and how many of them are encoded at once."""
BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_])(?=[ \n][^\W\d_])")
CUT_TRIES, AROUND_CUT = 20, 1000
"""Places where a cut is tried, and the characters before and after it by which it is judged."""


def tokenizer_file(path: Path) -> Path:
    """Return the tokenizer.json that `path` names: the file, or that of a run, a checkpoint or prepared data."""
    if not path.is_dir():
        return path
    places = [path / TOKENIZER, path.parent.parent / TOKENIZER]
    return next((place for place in places if place.is_file()), places[0])


def usage_of(place: str | Path) -> dict[str, bytes]:
    """Return the files of `USAGE` that lie beside the tokenizer of `place`, a path or URL, as they are. A Hugging Face
    folder's README.md becomes that of the base, and `TOOLS_TEMPLATE` a part of the other.

    Raises: UserError, OSError.
    """
    folder = place if is_url(place) else tokenizer_file(Path(place)).parent
    found = read_beside(folder, (*USAGE, CARD, TOOLS_TEMPLATE), MOST_TOKENIZER_BYTES)
    of_tools = found.pop(TOOLS_TEMPLATE, None)
    if of_tools is not None and TEMPLATE in found:
        found[TEMPLATE] = with_tools(*(text.decode(errors="replace") for text in (found[TEMPLATE], of_tools))).encode()
    card = found.pop(CARD, None)
    return found if card is None or not is_model_folder(folder) else {BASE_CARD: card} | found


def tokenizer_of(place: str | Path) -> bytes | None:
    """Return the tokenizer.json that `place`, a path or URL, names; None if there is none.

    Raises: UserError, OSError.
    """
    if is_url(place):
        return read_beside(place, [TOKENIZER], MOST_TOKENIZER_BYTES).get(TOKENIZER)
    file = tokenizer_file(Path(place))
    return read_at_most(file, MOST_TOKENIZER_BYTES) if file.is_file() else None


def how_to_prepare(tokenizer: Path | str) -> str:
    """Return the command that prepares text with the tokenizer of a file or folder, or of a model's URL."""
    if is_url(tokenizer):
        return f"argosy checkpoint import {tokenizer} --out runs/base; {how_to_prepare('runs/base')}"
    return f"argosy prepare TEXT --tokenizer {shlex.quote(str(tokenizer))} --out NEW-FOLDER"


@contextmanager
def _errors_of_library(where: str, what: str) -> Iterator[None]:
    """Raise UserError for an error of the library in this block: a bare Exception, or a panic of its Rust, which is no
    Exception (a regular expression that takes too long, a normalizer that is cut off)."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise UserError(f"tokenizer = {where}: {what} ({error}). {TOKENIZER_REMEDY}") from None
        raise


TOKENIZER_REMEDY = "Export the tokenizer with save_pretrained, or leave the key out to train one."


class Tokenizer:
    """A loaded tokenizer.json that has a token to end documents.

    Text is always encoded as text: where a document spells out a special token, its characters are encoded, so no
    document can fake its own end.
    """

    def __init__(self, json_text: str, where: str):
        self._where = where
        with _errors_of_library(where, "not a Hugging Face tokenizer.json"):
            self._engine = HuggingFaceTokenizer.from_str(json_text)
        self._engine.no_truncation()
        self._engine.no_padding()
        self._engine.encode_special_tokens = True
        takes_pieces = isinstance(self._engine.model, models.Unigram)
        spelled = [token for token, n in self.special_tokens.items() if takes_pieces or n in self.encode(token)]
        _cut_spelled_tokens(self._engine, spelled)
        self._of_templates: HuggingFaceTokenizer | None = None
        self.sha256 = hashlib.sha256(json_text.encode()).hexdigest()
        """SHA-256 of the file."""
        self.eod_id = self._find_end(where)
        """The token that ends a document: the first of END_NAMES that is a special token, or else that exists."""
        self.begin_ids = self._find_begin()
        """Tokens that begin a text: what the file's post-processor puts before one (BOS of Llama, Mistral and Gemma);
        none of a tokenizer that is trained here."""
        self._marks = {self.eod_id, *self.begin_ids, *self.special_tokens.values()}

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Load `path`, as `tokenizer_file`.

        Raises: UserError if it is missing, no tokenizer.json, or has no token that ends a document.
        """
        path = tokenizer_file(path)
        try:
            return cls(read_at_most(path, MOST_TOKENIZER_BYTES).decode(), str(path))
        except FileNotFoundError:
            raise UserError(
                f"tokenizer = {path}: there is no such file. Name a tokenizer.json (transformers makes it of other "
                "files: AutoTokenizer.from_pretrained(...).save_pretrained(...)), or leave the key out to train one."
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"tokenizer = {path}: cannot be read ({error}). Name a tokenizer.json file.") from None

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, so that special tokens and gaps between ids count."""
        return max(self._engine.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def end(self) -> str:
        """The text of the token that ends a document."""
        return self._engine.id_to_token(self.eod_id) or ""

    @property
    def least_vocab_size(self) -> int:
        """The least vocabulary of a model: one more than the largest id that text becomes, or that is around it."""
        return max(text_vocabulary(self._engine), self.eod_id + 1, *(begin + 1 for begin in self.begin_ids))

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with nothing added before or after."""
        with self._encoding():
            return self._engine.encode(text, add_special_tokens=False).ids

    def _encoding(self) -> AbstractContextManager[None]:
        return _errors_of_library(self._where, "it cannot encode a text")

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a text that is to be continued, begun as documents are: with `begin_ids`, or else with the
        end of the document before."""
        return [*(self.begin_ids or [self.eod_id]), *self.encode(text)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, by the library's fastest method, which computes no offsets."""
        with self._encoding():
            return [e.ids for e in self._engine.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_template(self, text: str) -> list[int]:
        """Return the ids of a text that a chat template made: special tokens in it are what they are."""
        with self._encoding():
            if self._of_templates is None:
                self._of_templates = HuggingFaceTokenizer.from_str(self._engine.to_str())
            return self._of_templates.encode(text, add_special_tokens=False).ids

    @property
    def special_tokens(self) -> dict[str, int]:
        return {token.content: n for n, token in self._engine.get_added_tokens_decoder().items() if token.special}

    def decode(self, ids: Sequence[int], after: Sequence[int] = ()) -> str:
        """Return the text of `ids` that follow others. Decoders of Llama 2's kind drop a space where a text begins."""
        if not after or after[-1] in self._marks:
            return self._engine.decode(ids)
        dot = self.encode(".")
        return self._engine.decode([*dot, *ids])[len(self._engine.decode(dot)) :]

    def _find_begin(self) -> list[int]:
        with self._encoding():
            bare, begun = (self._engine.encode(".", add_special_tokens=added).ids for added in (False, True))
        at = next((at for at in range(len(begun)) if bare and begun[at : at + len(bare)] == bare), 0)
        return begun[:at]

    def _find_end(self, where: str) -> int:
        special, every = self.special_tokens, self._engine.get_vocab()  # text may have made words of the other names
        for known, name in product((special, every), END_NAMES):
            if name in known:
                return known[name]
        raise UserError(
            f"tokenizer = {where}: no token ends a document (looked for {' '.join(END_NAMES)}). "
            f"Add {END_OF_DOCUMENT} to its added_tokens, or use another tokenizer."
        )


def text_vocabulary(engine: HuggingFaceTokenizer) -> int:
    """Return one more than the largest id that text becomes. No text becomes a special token, and some, as that of
    Gemma 3's pictures, are beyond the embeddings of models that come with them."""
    special = {number for number, token in engine.get_added_tokens_decoder().items() if token.special}
    return max(set(engine.get_vocab(with_added_tokens=True).values()) - special, default=-1) + 1


def _cut_spelled_tokens(engine: HuggingFaceTokenizer, special: Iterable[str]) -> None:
    """Have `engine` cut a special token that a text spells after its first character. SentencePiece's vocabularies have
    it as a piece, which nothing else keeps Unigram from taking; other models may know it as a word, or merge it."""
    spelled = "|".join(f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in special if len(token) > 1)
    steps = [engine.pre_tokenizer] if engine.pre_tokenizer else []
    if spelled:
        steps.append(pre_tokenizers.Split(Regex(spelled), behavior="isolated"))
        engine.pre_tokenizer = pre_tokenizers.Sequence(steps)


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


Ragged = tuple[npt.NDArray[Any], npt.NDArray[np.int64]]
"""The ids of all texts end to end, and the number of ids of each."""


@dataclass(frozen=True)
class EncodedBatch:
    """Documents as tokens, each between the tokenizer's `begin_ids` and the end-of-document token."""

    tokens: npt.NDArray[Any]
    """Tokens of all documents, end to end."""
    lengths: npt.NDArray[np.int64]
    """Number of tokens of each document, its beginning and end included."""
    text_bytes: npt.NDArray[np.int64]
    """UTF-8 bytes of each document."""
    held_out: npt.NDArray[np.bool_]
    """True for each document in the validation split."""

    def before(self, count: int) -> EncodedBatch:
        end = int(self.lengths[:count].sum())
        return EncodedBatch(self.tokens[:end], self.lengths[:count], self.text_bytes[:count], self.held_out[:count])

    def after(self, count: int) -> EncodedBatch:
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

    def __init__(self, tokenizer: Path, engine: TokenizerEngine, dtype: np.dtype[Any], validation_fraction: float):
        self._encode = encode_function(tokenizer, engine)
        loaded = Tokenizer.load(tokenizer)
        self._begin_ids, self._eod_id = loaded.begin_ids, loaded.eod_id
        self._dtype, self._validation_fraction = dtype, validation_fraction

    def encode(self, texts: Sequence[str]) -> EncodedBatch:
        ids, lengths = _encode_in_parts(texts, self._encode)
        raw, around = [text.encode() for text in texts], [*self._begin_ids, self._eod_id]
        ends = np.cumsum(lengths)
        places = np.repeat(ends - lengths, len(around))
        places[len(around) - 1 :: len(around)] = ends
        return EncodedBatch(
            tokens=np.insert(ids, places, np.tile(around, len(texts))).astype(self._dtype),
            lengths=lengths + len(around),
            text_bytes=np.array([len(text) for text in raw], np.int64),
            held_out=np.array([is_held_out(text, self._validation_fraction) for text in raw], np.bool_),
        )


def _encode_in_parts(texts: Sequence[str], encode: Callable[[Sequence[str]], Ragged]) -> Ragged:
    """Encode long texts in parts: `encode` takes some 150 bytes of memory for each byte of a text."""
    if max(map(len, texts), default=0) <= PART_CHARS:
        return encode(texts)
    ids, lengths = list[npt.NDArray[Any]](), list[int]()
    for text in texts:
        parts = _parts(text, encode)
        found = [encode(parts[at : at + PARTS_AT_ONCE])[0] for at in range(0, len(parts), PARTS_AT_ONCE)]
        ids += found
        lengths.append(sum(map(len, found)))
    return np.concatenate(ids), np.array(lengths, np.int64)


def _parts(text: str, encode: Callable[[Sequence[str]], Ragged]) -> list[str]:
    """Return the parts of a text, cut between words where what is around a cut has the same ids in two parts. A
    tokenizer that puts something before every text has no such place, and the text stays whole."""
    starts = [0]
    while starts[-1] + PART_CHARS < len(text):
        places = islice((found.start() for found in BETWEEN_WORDS.finditer(text, starts[-1] + PART_CHARS)), CUT_TRIES)
        cut = next((at for at in places if _is_cut(text[at - AROUND_CUT : at], text[at : at + AROUND_CUT], encode)), 0)
        if not cut:
            break
        starts.append(cut)
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def _is_cut(left: str, right: str, encode: Callable[[Sequence[str]], Ragged]) -> bool:
    ids, lengths = encode([left + right, left, right])
    return np.array_equal(ids[: lengths[0]], ids[lengths[0] :])


def is_held_out(text: bytes, fraction: float) -> bool:
    """Decide by a hash of the text alone, so that copies of a document are never in both splits."""
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "little") < int(fraction * 2**64)


def encode_function(tokenizer: Path, engine: TokenizerEngine) -> Callable[[Sequence[str]], Ragged]:
    """Return the function that encodes with `engine`. Raises: UserError if it is fastokens and not installed."""
    return _fastokens(tokenizer) if engine == "fastokens" else _huggingface(tokenizer)


def choose_engine(wanted: Literal["auto", TokenizerEngine], tokenizer: Path, sample: Iterable[str]) -> TokenizerEngine:
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
    fastokens = imported("fastokens", "fast-tokenizer", "engine = fastokens")
    tokenizer = None

    def encode(texts: Sequence[str]) -> Ragged:
        nonlocal tokenizer
        tokenizer = tokenizer or fastokens.Tokenizer.from_file(str(path))
        ids, offsets = tokenizer.encode_batch_flat(list(texts), add_special_tokens=False, split_special_tokens=True)
        ends = np.frombuffer(offsets, "<i8")
        return np.frombuffer(ids, "<u4"), ends[1:] - ends[:-1]

    return encode
