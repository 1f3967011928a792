"""What a loaded model says: logits and texts, in one process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import argosy
from argosy.config.dump import save_run
from argosy.config.load import load
from argosy.errors import UserError
from argosy.inference.huggingface import export_checkpoint
from argosy.inference.loaded_model import LoadedModel, generate, load_model
from argosy.inference.sampling import Sampling
from argosy.inference.trained_model import open_checkpoint

PROMPT = "def train("
FREE = Sampling(max_tokens=60, temperature=1.0, top_p=1.0, seed=1)
GREEDY = Sampling(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def model(trained: Path) -> Iterator[LoadedModel]:
    with argosy.load_model(trained) as loaded:
        yield loaded


def written(model: LoadedModel, sampling: Sampling, prompt: str = PROMPT) -> str:
    return next(model.complete([prompt], sampling)).text


def test_logits_are_those_of_the_decoder_in_fp32(model, trained):
    tokens = torch.randint(0, 400, (3, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = open_checkpoint(trained).model(torch.device("cpu"))(tokens)
    found = model.logits(tokens)
    assert found.dtype == torch.float32 and torch.equal(found, expected)
    assert torch.equal(model.logits(tokens.tolist()), expected)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 400]], "token 400, and the model knows those from 0 to 399"),
        ([[-1, 4]], "token -1, and the model knows"),
        ([[1, 2], [3]], "rows of several lengths"),
        ([1, 2], r"whole numbers \[rows, tokens\] are needed, not \[2\]"),
        (torch.zeros(1, 2), "not .* torch.float32"),
        (torch.zeros(2, 0, dtype=torch.int64), "are needed"),
        (torch.zeros(1, 129, dtype=torch.int64), r"rows of 129 tokens, and model\.max_seq_len is 128"),
    ],
)
def test_tokens_that_are_none_are_refused(model, tokens, message):
    with pytest.raises(UserError, match=message):
        model.logits(tokens)


def test_the_text_follows_from_the_seed(trained, model):
    first, second = generate(trained, PROMPT, seed=3), model.generate(PROMPT, seed=3)
    assert first == second != ""
    assert model.generate(PROMPT, seed=4) != first


def test_at_temperature_zero_the_seed_does_not_matter(model):
    assert model.generate(PROMPT, temperature=0, seed=1) == model.generate(PROMPT, temperature=0, seed=2)


def test_the_pieces_are_the_text_and_a_prefix_of_a_longer_one(model):
    text, pieces = written(model, FREE), list(model.stream([PROMPT], FREE))
    assert "".join(piece.text for piece in pieces) == text and len(pieces) > 10
    assert [piece.finish for piece in pieces] == [*[""] * (len(pieces) - 1), pieces[-1].finish]
    shorter = written(model, Sampling(20, 1.0, 1.0, 1))
    assert text.startswith(shorter.rstrip("\N{REPLACEMENT CHARACTER}"))


def test_the_rows_of_a_batch_are_written_as_if_alone(model):
    prompts: list[Any] = ["import", PROMPT, "", "class A:\n    def f(self):\n        return", [0, 5, 6]]
    together = list(model.complete(prompts, FREE, batch_size=3))
    alone = [next(model.complete([p], Sampling(60, 1.0, 1.0, 1 + row))) for row, p in enumerate(prompts)]
    assert [(c.text, c.tokens, c.finish) for c in together] == [(c.text, c.tokens, c.finish) for c in alone]
    assert [c.prompt for c in together] == prompts
    assert model.generate(prompts, temperature=0, max_tokens=12) == [written(model, GREEDY, p) for p in prompts]


def test_a_short_row_beside_one_beyond_the_original_context_is_written_as_if_alone(trained, tmp_path):
    """longrope: the divisors follow from the row's own length."""
    shutil.copytree(trained, tmp_path / "run")
    run = load(tmp_path / "run" / "run.toml")
    pairs = run.model.head_width // 2
    scaling = {"kind": "longrope", "original_max_seq_len": 40, "short_divisors": (1.0,) * pairs,
               "long_divisors": tuple(2.0 + i for i in range(pairs))}  # fmt: skip
    save_run(run.with_keys(model={"rope_scaling": scaling}), tmp_path / "run" / "run.toml")
    prompts = ["import", "word " * 30, PROMPT]
    with argosy.load_model(tmp_path / "run") as stretched:
        together = stretched.generate(prompts, temperature=0, max_tokens=12)
        assert together == [written(stretched, GREEDY, prompt) for prompt in prompts]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_it_ends_before_a_stop_string_wherever_its_pieces_are_cut(model, length):
    text = written(model, FREE)
    for start in range(0, len(text) - length, 13):
        stop = text[start : start + length]
        found = next(model.complete([PROMPT], Sampling(60, 1.0, 1.0, 1, ("never to be found", stop))))
        assert found.text == text[: text.index(stop)] and found.finish == "stop"


def test_a_reader_may_go_away(model):
    pieces = model.stream([PROMPT, "import"], FREE)
    next(pieces)
    pieces.close()
    assert model.generate(PROMPT, max_tokens=2)


def test_a_text_that_is_not_utf_8_is_refused(model):
    with pytest.raises(UserError, match=r"a prompt: '\\udcff' at place 1 is no character\. Give text in UTF-8"):
        model.generate("a\udcff")


def test_it_begins_without_a_prompt_too(trained):
    assert generate(trained, max_tokens=20)


def test_it_stays_within_the_context_of_the_model(model):
    found = next(model.complete([PROMPT], Sampling(10_000, 1.0, 1.0, 1)))
    assert len(found.tokens) == 128 - len(model.tokens_of(PROMPT)) and found.finish == "length"


def test_a_prompt_that_fills_the_context_is_refused(trained):
    with pytest.raises(UserError, match=r"the prompt has \d+ tokens and model\.max_seq_len is 128\. Shorten it"):
        generate(trained, "word " * 128)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature = -1.0: must be 0 or more"),
        ({"top_p": 0.0}, "top_p = 0.0: must be above 0"),
        ({"top_p": 1.5}, "top_p = 1.5: must be above 0 and at most 1"),
        ({"max_tokens": 0}, "max_tokens = 0: must be at least 1"),
        ({"seed": -1}, "seed = -1: must be from 0"),
        ({"stop": ["x", ""]}, 'stop = "": every text has the empty one'),
        ({"top_k": 5}, "no setting 'top_k'; there are max_tokens"),
    ],
)
def test_settings_that_make_no_sense_are_refused(model, settings, message):
    with pytest.raises(UserError, match=message):
        model.generate(PROMPT, **settings)


@pytest.mark.parametrize(("prompt", "message"), [([], "without tokens"), ([400], "token 400, and the model")])
def test_a_prompt_that_is_none_is_refused(model, prompt, message):
    with pytest.raises(UserError, match=message):
        next(model.stream([prompt]))


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="no committed checkpoint there"):
        generate(tmp_path, PROMPT)


def test_a_run_without_its_tokenizer_is_refused(trained, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for name in ("run.toml", "checkpoints"):
        (run_dir / name).symlink_to(trained / name)
    with pytest.raises(UserError, match=r"tokenizer\.json: no tokenizer there\. Copy .* AutoTokenizer"):
        generate(run_dir, PROMPT)


def test_a_hugging_face_folder_says_the_same_and_ends_where_it_says(model, trained, tmp_path):
    export_checkpoint(trained, tmp_path / "out")
    shutil.copy(trained / "tokenizer.json", tmp_path / "out")
    tokens = torch.arange(20)[None]
    text = written(model, GREEDY)
    tokens_written = next(model.complete([PROMPT], GREEDY)).tokens
    last = tokens_written[2]
    until_then = tokens_written[: tokens_written.index(last) + 1]
    with load_model(tmp_path / "out") as theirs:
        assert torch.equal(theirs.logits(tokens), model.logits(tokens))
        assert written(theirs, GREEDY) == text
    (tmp_path / "out" / "generation_config.json").write_text(f'{{"eos_token_id": [{last}, 100000]}}')
    with load_model(tmp_path / "out") as theirs:
        found = next(theirs.complete([PROMPT], GREEDY))
        assert (found.tokens, found.finish) == (until_then, "stop")
    (tmp_path / "out" / "generation_config.json").unlink()
    said = json.loads((tmp_path / "out" / "config.json").read_text()) | {"eos_token_id": [last]}
    (tmp_path / "out" / "config.json").write_text(json.dumps(said))
    with load_model(tmp_path / "out") as theirs:
        assert next(theirs.complete([PROMPT], GREEDY)).tokens == until_then
    for text in ("{", "[" * 100_000):
        (tmp_path / "out" / "generation_config.json").write_text(text)
        with pytest.raises(UserError, match=r"generation_config\.json: it is no JSON"):
            load_model(tmp_path / "out")
