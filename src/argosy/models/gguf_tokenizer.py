"""A tokenizer.json as GGUF says it: tokens, their types, merges or scores, special tokens and the chat template.

llama.cpp has its own code for each way to split text before BPE, by name. Of a tokenizer.json that splits in a way
without a name nothing is written: it would read text as other tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from argosy.data.manifest import TEMPLATE, TOKENIZER
from argosy.data.tokenizer import MOST_TOKENIZER_BYTES, SPLIT
from argosy.errors import UserError
from argosy.files import json_of, read_at_most
from argosy.models.hf_dense import QWEN2_SPLIT

GPT2 = "byte_level"
"""Stands for the split that is built into the ByteLevel pre-tokenizer: GPT-2's."""
LLAMA3_SPLIT = SPLIT
"""Llama 3 splits as GPT-4 does, and as the tokenizers that are trained here."""
PRE_TOKENIZERS = {
    (LLAMA3_SPLIT, True): "llama-bpe",
    (LLAMA3_SPLIT, False): "dbrx",
    (QWEN2_SPLIT, False): "qwen2",
    (GPT2, False): "gpt-2",
    (f"digits {GPT2}", False): "smollm",
}
"""The split of text, and True if a piece that is a token stays whole whatever the merges say -> llama.cpp's name."""
SPACE = "▁"
_GENERATION = re.compile(r"(\{%[-+]?\s*)(?:(end)|)generation(?=\s*[-+]?%\})")
"""Marks of answers in chat templates, which llama.cpp does not know."""


def add_tokenizer(writer: Any, folder: Path | None, vocab_size: int, eod_id: int | None) -> None:
    """Add the tokenizer in `folder` to a `gguf.GGUFWriter`; without a folder, say that there is none.

    eod_id: the token that ends a document, which is the last of a text unless the folder names another.
    Raises: UserError if llama.cpp has no tokenizer that gives the same ids.
    """
    if folder is None:
        writer.add_tokenizer_model("none")
        return
    try:
        _add_tokenizer(writer, folder, vocab_size, eod_id)
    except UserError:
        raise
    except Exception as error:  # of what is none of the format, here and in the package, which reads the files too
        problem = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{folder}: its tokenizer cannot be read ({problem}). Restore {TOKENIZER}, tokenizer_config.json and "
            f"config.json. {EXPORT_REMEDY}"
        ) from None


def _add_tokenizer(writer: Any, folder: Path, vocab_size: int, eod_id: int | None) -> None:
    import gguf

    file = folder / TOKENIZER
    record = json_of(read_at_most(file, MOST_TOKENIZER_BYTES))
    model = record["model"]
    if model.get("type") != "BPE":
        raise UserError(f"{file}: llama.cpp reads no {model.get('type')} tokenizer here, only BPE. {EXPORT_REMEDY}")
    is_sentencepiece = bool(model.get("byte_fallback"))
    tokens, types = _tokens(record, vocab_size, file, is_sentencepiece)
    if is_sentencepiece:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(_scores(tokens, model["merges"]))
        writer.add_add_space_prefix(_adds_space(record, file))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_name_of_split(record, file))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special = gguf.SpecialVocab(folder, load_merges=not is_sentencepiece, n_vocab=len(tokens))
    if eod_id is not None:
        special.special_token_ids.setdefault("eos", eod_id)
    special.add_special_token.setdefault("bos", False)  # llama.cpp has defaults for some names
    if (template := folder / TEMPLATE).is_file():  # the package reads it only beside a tokenizer_config.json
        text = read_at_most(template, MOST_TOKENIZER_BYTES).decode()  # a block of another kind keeps blanks as they are
        special.chat_template = _GENERATION.sub(lambda m: m[1] + ("endif" if m[2] else "if true"), text)
    special.add_to_gguf(writer, quiet=True)


EXPORT_REMEDY = "Export with --format safetensors."


def _tokens(
    record: Mapping[str, Any], vocab_size: int, file: Path, is_sentencepiece: bool
) -> tuple[list[str], list[int]]:
    """Return the text and type of each token, with names for those that the model has beyond the tokenizer's."""
    from gguf import TokenType

    by_id = {number: text for text, number in record["model"]["vocab"].items()}
    # What is beyond the embedding, and no text becomes, llama.cpp's own converter leaves out too.
    added = {t["id"]: t for t in record.get("added_tokens", ()) if t["id"] < vocab_size or not t["special"]}
    by_id |= {number: token["content"] for number, token in added.items()}
    if by_id and max(by_id) >= vocab_size:
        raise UserError(
            f"{file} has {max(by_id) + 1} tokens and model.vocab_size = {vocab_size}. Give the tokenizer that the "
            "model was trained with."
        )
    unknown = record["model"].get("unk_token")
    types = []
    for number in range(vocab_size):
        text = by_id.get(number)
        if text is None:
            types.append(TokenType.UNUSED)
        elif text == unknown:
            types.append(TokenType.UNKNOWN)
        elif number in added:
            types.append(TokenType.CONTROL if added[number]["special"] else TokenType.USER_DEFINED)
        elif is_sentencepiece and len(text) == 6 and text.startswith("<0x"):
            types.append(TokenType.BYTE)
        else:
            types.append(TokenType.NORMAL)
    return [by_id.get(number, f"[PAD{number}]") for number in range(vocab_size)], [int(kind) for kind in types]


def _scores(tokens: Sequence[str], merges: Sequence[Any]) -> list[float]:
    """Return scores by which llama.cpp joins pieces in the order of the merges: the earlier, the higher."""
    first: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        first.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
    return [-float(first.get(token, len(merges))) for token in tokens]


def _adds_space(record: Mapping[str, Any], file: Path) -> bool:
    """Return True if the tokenizer puts a space before the text. Raises: UserError if it does anything else."""
    normalizer, before = record.get("normalizer") or {}, record.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    kinds = [step["type"] for step in steps]
    spaces = [step for step in steps if step["type"] == "Replace" and step.get("content") == SPACE]
    prepends = [step for step in steps if step["type"] == "Prepend" and step.get("prepend") == SPACE]
    if before.get("type") == "Metaspace" and not steps and before.get("replacement") == SPACE:
        return before.get("prepend_scheme", "always") != "never"
    splits_at_spaces = before.get("type") in (None, "Split")  # Gemma's: a split at what is no longer there
    if not splits_at_spaces or len(spaces) != 1 or len(spaces) + len(prepends) != len(kinds):
        raise UserError(f"{file}: llama.cpp has no tokenizer that normalizes by {kinds}. {EXPORT_REMEDY}")
    return bool(prepends)


def _name_of_split(record: Mapping[str, Any], file: Path) -> str:
    steps = record.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps] if steps else [])
    found = []
    for step in steps:
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step.get("invert"):
            found.append(step["pattern"].get("Regex", ""))
        elif step["type"] == "ByteLevel" and not step.get("add_prefix_space"):
            found += [GPT2] if step.get("use_regex", True) else []
        elif step["type"] == "Digits" and step.get("individual_digits"):
            found.append("digits")
        else:
            found.append(step["type"])
    keeps_whole = bool(record["model"].get("ignore_merges"))
    name = PRE_TOKENIZERS.get((" ".join(found), keeps_whole))
    if name is None:
        raise UserError(
            f"{file}: llama.cpp has no name for how it splits text ({' '.join(found)[:80]!r}). {EXPORT_REMEDY}"
        )
    return name
