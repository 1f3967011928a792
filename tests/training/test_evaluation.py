"""Loss on held-out text does not depend on who measures it."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from argosy.data.packing import IGNORED, REJECTED_BIT, START_BIT, TRAINED
from argosy.data.shards import BadShard, TokenSource
from argosy.errors import UserError
from argosy.parallel.world import World
from argosy.training.evaluation import Evaluator, HeldOut, Score, evaluate, unigram_score
from argosy.training.stop import StoppedEarly
from chats import rows_of
from tiny import EAGER, MODEL, decoder, eager, laid_out, prepare_corpus, run_config

SEQ_LEN = 32


@pytest.fixture(scope="module")
def held_out(corpus) -> HeldOut:
    return HeldOut.read([TokenSource(corpus, "validation")], SEQ_LEN, max_tokens=700)


def score(world: World, held_out: HeldOut, plan: str) -> Score:
    """The score of the tiny model with its initial weights."""
    laid = eager(plan)
    return evaluate(laid_out(world, laid), held_out, laid.microbatch, world)


@pytest.mark.parametrize(
    "plan",
    [
        "microbatch=1",
        "microbatch=8",
        "dp_replicate=2,microbatch=3",
        "dp_replicate=4,microbatch=8",
        "dp_shard=4,microbatch=2",
        "dp_shard=2,zero=1,tp=2",
        "cp=2,tp=2,microbatch=4",
        "pp=2,microbatch=2",
        "pp=2,dp_shard=2,microbatch=2",
    ],
)
def test_the_score_does_not_depend_on_the_layout(workers, held_out, plan):
    whole = score(World(), held_out, f"microbatch={len(held_out.windows)}")
    for found in workers.run(eager(plan).world_size, score, held_out, plan):
        assert found.line() == pytest.approx(whole.line(), rel=1e-6)
        assert (found.perplexity, found.tokens) == (pytest.approx(whole.perplexity, rel=1e-6), whole.tokens)


def test_what_fills_a_short_batch_does_not_count_and_has_no_more_documents_than_text_has(held_out):
    """Be the mark that ends a document token 0 or another."""
    seen = []
    model = mock.Mock(dp=1, dp_rank=0, microbatches_at_once=1)
    model.loss = lambda batch: seen.extend(batch) or torch.zeros(())
    windows = np.full((5, SEQ_LEN + 1), 7, np.int32)
    for mark in (0, 3):
        evaluate(model, dataclasses.replace(held_out, windows=windows, end_of_document=mark), 4, World())
    for short in (seen[1], seen[3]):
        assert (short.targets_BT != IGNORED).sum(1).tolist() == [SEQ_LEN, 0, 0, 0]
        assert short.documents.count == 4  # as many as rows


def test_each_batch_is_announced_and_the_evaluation_ends_where_that_raises(held_out):
    model = mock.Mock(dp=1, dp_rank=0, microbatches_at_once=1)
    model.loss = lambda batch: torch.zeros(())
    batches = -(-len(held_out.windows) // 4)
    announced = mock.Mock(side_effect=[None] * (batches - 1) + [StoppedEarly])
    with pytest.raises(StoppedEarly):
        evaluate(model, held_out, 4, World(), announced)
    assert announced.call_count == batches


def test_the_score_is_the_mean_cross_entropy(held_out):
    whole_documents = dataclasses.replace(held_out, end_of_document=-1)  # no mark: each row is one document
    windows = torch.from_numpy(held_out.windows.astype(np.int64))
    loss = F.cross_entropy(decoder()(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()).item()
    found = score(World(), whole_documents, "microbatch=4")
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(loss / math.log(2) * held_out.tokens / held_out.text_bytes, rel=1e-5)


def test_a_model_that_has_diverged_still_has_a_score(held_out):
    assert Score.of(1e6 * held_out.tokens, held_out).perplexity == math.inf


def test_the_unigram_baseline_is_what_counting_gives(corpus, held_out):
    source = TokenSource(corpus)
    seen = Counter(source.tokens(0, len(source)).tolist())
    total = len(source) + MODEL["vocab_size"]
    nats = [-math.log((seen[token] + 1) / total) for token in held_out.windows[:, 1:].flatten().tolist()]
    assert unigram_score([source], held_out, MODEL["vocab_size"]).loss == pytest.approx(sum(nats) / len(nats))


def test_bytes_and_baseline_of_pairs_are_those_of_their_better_answers():
    chosen, rejected = (np.array([1 | START_BIT, *[2 | TRAINED] * length], np.int32) for length in (6, 2))
    rejected[0] |= REJECTED_BIT
    rows = rows_of([np.concatenate([chosen, rejected])])
    split = mock.MagicMock(text_bytes_per_token=8 * 3 / len(rows[0, 1:]))  # three bytes for each token of an answer
    split.__len__.return_value, split.windows.return_value = rows[:, 1:].size, len(rows)
    split.read_windows = lambda windows, out: np.copyto(out, rows[windows])
    held_out = HeldOut.read([split], SEQ_LEN, 10**6)
    assert (held_out.tokens, held_out.text_bytes) == (6, pytest.approx(6 * 3))
    words = rows[0, :-1]
    split.manifest.rows.seq_len = len(words)
    split.tokens = lambda start, stop: words[start:stop]
    assert unigram_score([split], held_out, 10).loss == pytest.approx(-math.log((6 + 1) / (6 + 10)))


def test_held_out_text_is_always_the_same_and_an_equal_share_of_each_source(corpus, held_out):
    source = TokenSource(corpus, "validation")
    assert np.array_equal(HeldOut.read([source], SEQ_LEN, 700).windows, held_out.windows)
    both = HeldOut.read([source, source], SEQ_LEN, 1400)
    assert np.array_equal(both.windows, np.concatenate([held_out.windows] * 2))
    assert held_out.tokens <= 700


def test_sources_without_held_out_text_are_left_out(corpus, held_out, tmp_path):
    without = TokenSource(prepare_corpus(tmp_path, validation_fraction=0.0), "validation")
    assert HeldOut.read([without], SEQ_LEN, 700).tokens == 0
    assert HeldOut.read([without, TokenSource(corpus, "validation")], SEQ_LEN, 700).tokens == held_out.tokens


def test_a_source_with_less_held_out_text_than_a_sample_is_left_out_beside_others(corpus, tmp_path):
    small, progress = prepare_corpus(tmp_path, max_text_bytes=20_000, validation_fraction=0.01), mock.MagicMock()
    seq_len = len(TokenSource(small, "validation"))
    sources = [TokenSource(small), TokenSource(corpus)]
    assert 0 < seq_len < len(TokenSource(corpus, "validation"))
    run = run_config(corpus, data={"seq_len": seq_len})
    found = Evaluator(run, EAGER, sources, mock.MagicMock(), World(), mock.MagicMock(), progress)
    alone = HeldOut.read([TokenSource(corpus, "validation")], seq_len, run.evaluate.tokens)
    assert np.array_equal(found.held_out.windows, alone.windows)
    assert f"leave out {small}: {seq_len} tokens are held out" in progress.say.call_args.args[0]


def test_held_out_text_that_cannot_be_read_is_left_out_if_the_run_asks_for_that(corpus, tmp_path):
    folder = shutil.copytree(corpus, tmp_path / "damaged")
    (shard,) = folder.glob("validation-*.bin")
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    (tmp_path / "whole").symlink_to(corpus)
    sources, progress = [TokenSource(folder), TokenSource(tmp_path / "whole")], mock.MagicMock()

    def evaluator(on_bad_shard: str) -> Evaluator:
        run = run_config(folder, data={"on_bad_shard": on_bad_shard})
        return Evaluator(run, EAGER, sources, mock.MagicMock(), World(), mock.MagicMock(), progress)

    with pytest.raises(BadShard):
        evaluator("stop")
    whole = HeldOut.read([TokenSource(corpus, "validation")], SEQ_LEN, 250)
    assert np.array_equal(evaluator("skip").held_out.windows, whole.windows)
    assert "evaluations leave out" in progress.say.call_args.args[0]


def test_less_held_out_text_than_a_sample_is_said(corpus):
    with pytest.raises(UserError, match=r"data\.seq_len = 10000000"):
        HeldOut.read([TokenSource(corpus, "validation")], 10_000_000, 700)
