"""Held-out text is scored as in training."""

from __future__ import annotations

import shutil

import pytest

from argosy.checkpoint import store
from argosy.errors import UserError
from argosy.inference.evaluate import evaluate
from argosy.launch import run_folder
from argosy.observe.events import Metrics
from argosy.observe.report import Report
from argosy.parallel.world import World
from tiny import EAGER, SOURCES, prepare_corpus, run_config, train_in


def test_the_score_is_that_of_the_run_itself(trained, corpus):
    validation = Report.load(trained).validation
    found = evaluate(trained, max_tokens=run_config(corpus).evaluate.tokens)
    assert found.loss == pytest.approx(validation["loss"], rel=1e-6)
    assert found.bits_per_byte == pytest.approx(validation["bits_per_byte"], rel=1e-6)
    assert found.tokens == validation["tokens"]


def test_sources_that_only_stages_name_are_scored_as_in_the_run(corpus, tmp_path):
    other = prepare_corpus(tmp_path / "other", tokenizer=corpus / "tokenizer.json", input=(str(SOURCES / "v1"),))
    stages = [{"from_step": 1, "sources": {str(other): 1.0}}]
    run = run_config(corpus, data={"stages": stages}, train={"steps": 2})
    (folder := tmp_path / "run").mkdir()
    run_folder.write(folder, run, EAGER, [corpus])
    train_in(World(), run, EAGER, folder)
    validation = Report.load(folder).validation
    assert validation["loss"] == pytest.approx(evaluate(folder, max_tokens=run.evaluate.tokens).loss, rel=1e-6)


def test_one_checkpoint_and_other_text_may_be_named(trained, corpus):
    (checkpoint,) = store.committed(trained)
    train_loss = evaluate(checkpoint.folder, corpus, split="train", max_tokens=4000).loss
    trained_to = [record["loss"] for record in Metrics(trained).read() if "loss" in record][-1]
    assert train_loss == pytest.approx(trained_to, abs=0.5)


def test_text_of_another_tokenizer_is_refused(trained, tmp_path):
    files = tuple(str(SOURCES / name) for name in ("errors.py", "main.py", "fields.py"))
    other = prepare_corpus(tmp_path, vocab_size=300, input=files, validation_fraction=0.4)
    with pytest.raises(UserError, match="prepared with another tokenizer"):
        evaluate(trained, other)


def test_an_empty_split_is_refused(trained, tmp_path):
    tokenizer = trained / "tokenizer.json"
    other = prepare_corpus(tmp_path, tokenizer=tokenizer, input=(str(SOURCES / "errors.py"),), validation_fraction=0.0)
    with pytest.raises(UserError, match="its validation split is empty"):
        evaluate(trained, other)
    assert evaluate(trained, other, split="train").tokens > 0


def test_what_is_damaged_in_the_other_split_does_not_count(trained, corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "cut")
    (tmp_path / "cut" / "train-00000.bin").write_bytes(b"")
    assert evaluate(trained, tmp_path / "cut", max_tokens=500).tokens > 0


def test_errors_name_the_length_of_windows_as_it_is_given(trained):
    with pytest.raises(UserError, match=r": seq_len = 31 is not a multiple of 2.*\. Try seq_len = 30"):
        evaluate(trained, seq_len=31, plan="tp=2")


def test_windows_longer_than_the_context_are_refused(trained):
    with pytest.raises(UserError, match=r"seq_len = 129 is more than model\.max_seq_len = 128\. Try 128 or less"):
        evaluate(trained, seq_len=129)
