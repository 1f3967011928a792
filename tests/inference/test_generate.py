"""Text from a trained model."""

from __future__ import annotations

import pytest

from argosy.errors import UserError
from argosy.inference.generate import generate, stream

PROMPT = "def train("
NO_STOP = {"max_tokens": 60, "temperature": 1.0, "top_p": 1.0, "seed": 1}


def test_the_text_follows_from_the_seed(trained):
    first, second = (generate(trained, PROMPT, seed=3) for _ in range(2))
    assert first == second != ""
    assert generate(trained, PROMPT, seed=4) != first


def test_at_temperature_zero_the_seed_does_not_matter(trained):
    assert generate(trained, PROMPT, temperature=0, seed=1) == generate(trained, PROMPT, temperature=0, seed=2)


def test_the_pieces_are_the_text_and_a_prefix_of_a_longer_one(trained):
    text = generate(trained, PROMPT, **NO_STOP)
    pieces = list(stream(trained, PROMPT, **NO_STOP, stop=()))
    assert "".join(pieces) == text and len(pieces) > 10
    assert text.startswith(
        generate(trained, PROMPT, **{**NO_STOP, "max_tokens": 20}).rstrip("\N{REPLACEMENT CHARACTER}")
    )


@pytest.mark.parametrize("length", [1, 2, 5])
def test_it_ends_before_a_stop_string_wherever_its_pieces_are_cut(trained, length):
    text = generate(trained, PROMPT, **NO_STOP)
    for start in range(0, len(text) - length, 7):
        stop = text[start : start + length]
        written = "".join(stream(trained, PROMPT, **NO_STOP, stop=("never to be found", stop)))
        assert written == text[: text.index(stop)]


def test_it_begins_without_a_prompt_too(trained):
    assert generate(trained, max_tokens=20)


def test_it_stays_within_the_context_of_the_model(trained):
    pieces = list(stream(trained, PROMPT, **{**NO_STOP, "max_tokens": 10_000}, stop=()))
    assert 0 < len(pieces) <= 128


def test_a_prompt_that_fills_the_context_is_refused(trained):
    with pytest.raises(UserError, match=r"the prompt has \d+ tokens and model\.max_seq_len is 128\. Shorten it"):
        generate(trained, "word " * 128)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="no committed checkpoint there"):
        generate(tmp_path, PROMPT)


def test_a_run_without_its_tokenizer_is_refused(trained, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for name in ("run.toml", "checkpoints"):
        (run_dir / name).symlink_to(trained / name)
    with pytest.raises(UserError, match=r"tokenizer\.json: no tokenizer there\. Copy"):
        generate(run_dir, PROMPT)
