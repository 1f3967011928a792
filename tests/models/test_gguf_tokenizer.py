"""Tokenizers in GGUF files: llama.cpp gives the ids that Hugging Face's tokenizers gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from argosy.config.model import ModelConfig
from argosy.data.chat_template import ChatTemplate
from argosy.data.tokenizer import train
from argosy.errors import UserError
from argosy.models.decoder import Decoder
from argosy.models.gguf_file import export_gguf
from argosy.models.gguf_tokenizer import GPT2, add_tokenizer
from argosy.models.hf_dense import QWEN2_SPLIT
from argosy.models.initialize import materialize
from argosy.models.lazy_weights import HeldWeights
from llama_cpp import LlamaCpp

TEXTS = (
    "def main(args):\n    if args.verbose:\n\tprint('hello  world', 12345, 3.14159)\n\n\n    return None  ",
    "It's Größe, 漢字 and 🙂🙂; she'll say WE'RE here!!! <|endoftext|> <s> not an end",
    " a  b   c\r\n\r\nd",
)
WORDS = [*TEXTS, *Path(__file__).read_text().splitlines()] * 3
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
MARKED = """{% for m in messages %}
    {% generation %}
{{- m['content'] }}
    {%- endgeneration %}
{% endfor %}"""


def byte_level(split: str, digits: bool = False) -> Tokenizer:
    """Return a byte-level BPE that splits text as said before."""
    engine = Tokenizer(models.BPE())
    own = split == GPT2
    steps: list[Any] = [] if own else [pre_tokenizers.Split(Regex(split), "isolated")]
    steps += [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own))
    engine.pre_tokenizer = pre_tokenizers.Sequence(steps)
    engine.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|endoftext|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    engine.train_from_iterator(WORDS, trainer)
    return engine


def with_byte_fallback(prepends: bool) -> Tokenizer:
    """Return a BPE like those of Llama 2 (with a space before the text) and Gemma."""
    engine = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    first: list[Any] = [normalizers.Prepend("▁")] if prepends else []
    engine.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    engine.train_from_iterator(
        [text.replace(" ", "▁") for text in WORDS],
        trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False, limit_alphabet=60),
    )
    record = json.loads(engine.to_str())
    record["added_tokens"] = record["added_tokens"][:3]  # bytes are plain tokens there
    engine = Tokenizer.from_str(json.dumps(record))
    engine.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    return engine


def read_by_llama_cpp(engine: Tokenizer, folder: Path, **settings: Any) -> LlamaCpp:
    """Write a model with this tokenizer as GGUF and open it. settings: of tokenizer_config.json."""
    folder.mkdir(exist_ok=True)
    engine.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = ModelConfig(layers=1, width=32, heads=1, kv_heads=1, head_width=32, ffn_width=32, vocab_size=640)
    model = Decoder(config)
    materialize(model, config, torch.device("cpu"), 0)
    end = next(filter(None, map(engine.token_to_id, ("<|endoftext|>", "</s>"))), 0)
    out = folder / "gguf"
    export_gguf(config, HeldWeights(model.state_dict()), out, tokenizer_dir=folder, eod_id=end)
    return LlamaCpp(out / "model-BF16.gguf")


@pytest.mark.parametrize("split", ["ours", QWEN2_SPLIT, GPT2, "digits"])
def test_byte_level_tokenizers_give_the_same_ids(split: str, tmp_path: Path) -> None:
    if split == "ours":
        train(WORDS, 400, tmp_path / "tokenizer.json")
        engine = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    else:
        engine = byte_level(GPT2 if split == "digits" else split, digits=split == "digits")
    engine.encode_special_tokens = True
    with read_by_llama_cpp(engine, tmp_path / "run", chat_template=TEMPLATE) as read:
        for text in TEXTS:
            assert read.tokenize(text) == engine.encode(text).ids
        assert read.chat_template == TEMPLATE
        assert read.eos_id == engine.token_to_id("<|endoftext|>")


def test_a_template_loses_its_marks_of_answers_and_a_token_of_pictures_is_left_out(tmp_path: Path) -> None:
    engine = byte_level(GPT2)
    engine.add_special_tokens([f"<image {number}>" for number in range(241)])  # the last is beyond the embedding
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "chat_template.jinja").write_text(MARKED)
    with read_by_llama_cpp(engine, tmp_path / "run") as read:
        given, talk = read.chat_template, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        assert given is not None and "generation" not in given  # llama.cpp knows no such marks
        assert ChatTemplate(given, {}, "").render(talk) == ChatTemplate(MARKED, {}, "").render(talk)


@pytest.mark.parametrize("prepends", [True, False])
def test_tokenizers_with_byte_fallback_give_the_same_ids(prepends: bool, tmp_path: Path) -> None:
    engine = with_byte_fallback(prepends)
    with read_by_llama_cpp(engine, tmp_path / "run", bos_token="<s>", eos_token="</s>") as read:
        for text in ("def main(args):\n    return  12", "Größe, 漢字 🙂"):
            assert read.tokenize(text) == engine.encode(text).ids
        assert read.tokenize("a")[0] == 1 and read.tokenize("a", special=False)[0] != 1


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (byte_level(r"\w+|\W+"), "llama.cpp has no name for how it splits text"),
        (Tokenizer(models.WordLevel({"a": 0}, "a")), "reads no WordLevel tokenizer"),
    ],
    ids=["split", "model"],
)
def test_a_tokenizer_that_llama_cpp_does_not_know_is_refused(engine: Tokenizer, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read_by_llama_cpp(engine, tmp_path / "run")
    assert not (tmp_path / "run" / "gguf").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [("tokenizer.json", "{"), ("tokenizer.json", "[]"), ("tokenizer_config.json", "{"), ("config.json", "{")],
)
def test_files_beside_a_tokenizer_that_cannot_be_read_are_named(tmp_path: Path, name: str, text: str) -> None:
    byte_level(GPT2).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=r"its tokenizer cannot be read \(.*Restore tokenizer\.json"):
        add_tokenizer(GGUFWriter(None, "llama"), tmp_path, 400, 0)
