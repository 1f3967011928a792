"""Tokenizers that put tokens of their own around a text."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing


def begun_tokenizer(plain: Path, path: Path) -> Path:
    """A tokenizer whose texts begin with a token of their own, as Llama's and Gemma's."""
    engine = Tokenizer.from_file(str(plain))
    engine.add_special_tokens(["<|begin|>"])
    bos = engine.token_to_id("<|begin|>")
    engine.post_processor = TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", bos)])
    engine.save(str(path))
    return path
