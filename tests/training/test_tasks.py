"""Tasks of lm-eval are scored as transformers would, under every plan."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from argosy.data.manifest import TOKENIZER
from argosy.data.tokenizer import END_OF_DOCUMENT, Tokenizer
from argosy.errors import UserError
from argosy.models import hf
from argosy.parallel.world import World
from argosy.sinks.sink import evaluation_values
from argosy.sweep.trials import metric_of
from argosy.training.rows import TaskScores, request_rows, scores_of_rows
from argosy.training.stop import StoppedEarly
from argosy.training.tasks import TaskScorer
from argosy.watch.reader import RunReader
from tasks import ANSWERS, CHOICES, task_file
from tiny import EAGER, decoder, eager, laid_out, losses, run_config, train_in
from tokenizers_with_marks import begun_tokenizer

SEQ_LEN = 64
BITS = "  - metric: bits_per_byte\n  - metric: word_perplexity\ndoc_to_target: question\n"
PLANS = ["microbatch=2", "tp=2", "pp=2,microbatch=2", "cp=2", "dp_shard=2,zero=3", "cp=2,tp=2"]
PLANS_OF_TASKS = ["microbatch=2", "pp=2,microbatch=2", "cp=2,tp=2"]
"""With a whole task; with requests all are."""


@pytest.fixture
def choices(tmp_path) -> Path:
    return task_file(tmp_path, "choices", "multiple_choice", CHOICES)


def scored(world: World, plan: str, names: list[str], corpus: Path, interrupt: bool = False) -> TaskScores | str:
    laid, tokenizer = eager(plan), Tokenizer.load(corpus / TOKENIZER)
    scorer = TaskScorer(
        names, tokenizer, laid_out(world, laid, data={"seq_len": SEQ_LEN}), laid.microbatch, SEQ_LEN, world
    )

    def before_batch(number: int, batches: int) -> None:
        if interrupt:
            raise StoppedEarly

    try:
        return scorer.score(before_batch)
    except StoppedEarly:
        world.barrier()
        return "stopped"


def expected(corpus: Path) -> float:
    """The share of questions whose answer the tiny model finds the likeliest, from its logits."""
    tokenizer, model, right = Tokenizer.load(corpus / TOKENIZER), decoder(), 0
    for i in range(12):
        context = tokenizer.encode(f"def f{i}():" + " x" * i)
        sums = [log_probability(model, context, tokenizer.encode(f" {c}" if c[0] != " " else c)) for c in ANSWERS]
        right += sums.index(max(sums)) == i % 4
    return right / 12


@torch.no_grad()
def log_probability(model: torch.nn.Module, context: list[int], continuation: list[int]) -> float:
    tokens = torch.tensor([context + continuation])
    log_p = model(tokens[:, :-1]).float().log_softmax(-1)[0, len(context) - 1 :]
    return float(log_p.gather(1, torch.tensor(continuation)[:, None]).sum())


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan in PLANS_OF_TASKS else pytest.mark.slow) for plan in PLANS]
)
def test_a_task_scores_the_same_under_every_plan(workers, corpus, choices, plan):
    for found in workers.run(eager(plan).world_size, scored, plan, [str(choices)], corpus):
        assert found["choices"]["acc"] == pytest.approx(expected(corpus))


def whole_scores(world: World, plan: str, requests: list[tuple[list[int], list[int]]]) -> list[tuple[float, float]]:
    rows, places = request_rows(requests, SEQ_LEN, filler=0)
    model = laid_out(world, eager(plan), data={"seq_len": SEQ_LEN})
    scores = scores_of_rows(model, len(rows), rows.__getitem__, 2, world, lambda *_: None, is_judged=True)
    return [tuple(scores[place].tolist()) for place in places]


@pytest.mark.parametrize("plan", ["microbatch=2", *PLANS[1:]])
def test_log_probabilities_and_likeliest_tokens_are_those_of_the_logits(workers, plan):
    generator = torch.Generator().manual_seed(0)
    model = decoder()
    requests = []
    for length in (1, 5, 9, 30, 2):
        context = torch.randint(400, (length,), generator=generator).tolist()
        with torch.no_grad():
            likeliest = int(model(torch.tensor([context])).argmax(-1)[0, -1])
        requests += [(context, [likeliest]), (context, [(likeliest + 1) % 400, likeliest])]
    for found in workers.run(eager(plan).world_size, whole_scores, plan, requests):
        for (context, continuation), (value, misses) in zip(requests, found, strict=True):
            assert value == pytest.approx(log_probability(model, context, continuation), rel=1e-5)
            assert (misses == 0) == (len(continuation) == 1)


def test_a_request_that_is_longer_than_a_row_loses_its_beginning():
    rows, places = request_rows([([1] * 50 + [2] * 20, [3, 4]), ([5], [6])], SEQ_LEN, filler=0)
    whole = whole_scores(World(), "microbatch=2", [([1] * 50 + [2] * 20, [3, 4]), ([1] * 42 + [2] * 20, [3, 4])])
    assert rows.shape == (2, SEQ_LEN + 1) and places == [(0, 0), (1, 0)]
    assert whole[0] == pytest.approx(whole[1])


def test_texts_are_scored_as_a_whole(tmp_path, corpus):
    file = task_file(tmp_path, "texts", "loglikelihood_rolling", BITS)
    found = scored(World(), "microbatch=2", [str(file)], corpus)["texts"]
    tokenizer, model, nats, letters = Tokenizer.load(corpus / TOKENIZER), decoder(), 0.0, 0
    for i in range(12):
        text = f"def f{i}():" + " x" * i
        nats -= log_probability(model, [tokenizer.eod_id], tokenizer.encode(text))
        letters += len(text)
    assert found["bits_per_byte"] == pytest.approx(nats / letters / math.log(2), rel=1e-5)


def test_a_continuation_that_is_no_token_of_its_own_is_scored_with_what_is_before(corpus):
    from argosy.training.harness import Harness

    harness, tokenizer = Harness.__new__(Harness), Tokenizer.load(corpus / TOKENIZER)
    harness._tokenizer, harness._score = tokenizer, lambda requests: requests
    *before, last = tokenizer.encode("x = self")
    texts = ("x = sel", "f")
    assert tokenizer.decode([last]).endswith("self")
    assert harness._loglikelihood_tokens([(texts, [*before, 7], []), (texts, [5], [6])]) == [
        (before, [last]),
        ([5], [6]),
    ]
    assert harness._loglikelihood_tokens([(("", ""), [5], [])]) == [([tokenizer.eod_id], [tokenizer.eod_id])]


def test_scores_after_a_beginning_are_those_of_lm_eval(tmp_path, corpus, choices):
    import lm_eval  # seconds, for which collecting need not wait
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerFast

    from transformers_models import load_theirs  # here, as ranks import this module

    names = [str(choices), str(task_file(tmp_path, "texts", "loglikelihood_rolling", BITS))]
    begun, model = begun_tokenizer(corpus / TOKENIZER, tmp_path / TOKENIZER), decoder(vocab_size=408)
    tokenizer = Tokenizer.load(begun)
    laid = laid_out(World(), EAGER, data={"seq_len": SEQ_LEN}, model={"vocab_size": 408})
    found = TaskScorer(names, tokenizer, laid, 2, SEQ_LEN, World()).score(lambda *_: None)
    hf.export_folder(model.config, model.state_dict(), tmp_path / "hf", dtype=torch.float32)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(begun), bos_token="<|begin|>", eos_token=END_OF_DOCUMENT)
    theirs.pad_token = END_OF_DOCUMENT
    peer = HFLM(load_theirs(tmp_path / "hf"), tokenizer=theirs, max_length=SEQ_LEN, batch_size=2, device="cpu")
    scores = lm_eval.evaluate(peer, TaskManager(include_defaults=False).load(names), bootstrap_iters=0)["results"]
    for task, metric in (("choices", "acc"), ("choices", "acc_norm"), ("texts", "bits_per_byte")):
        assert found[task][metric] == pytest.approx(scores[task][f"{metric},none"], rel=1e-5)


def test_a_signal_ends_it_on_all_ranks(workers, corpus, choices):
    assert workers.run(2, scored, "tp=2", [str(choices)], corpus, True) == ["stopped"] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("questions.jsonl", "elsewhere.jsonl"), "Check the task's file, and that its data are here"),
        (("doc_to_choice: choices", "doc_to_choice: !function tricks.choices"), "brings code of its own"),
        (("multiple_choice", "generate_until"), "which is not done while it trains"),
    ],
    ids=["no data", "code", "writes"],
)
def test_what_cannot_be_scored_is_refused(corpus, choices, change, message):
    choices.write_text(choices.read_text().replace(*change))
    with pytest.raises(UserError, match=message):
        scored(World(), "microbatch=2", [str(choices)], corpus)


def test_a_run_scores_tasks_at_each_evaluation_and_changes_no_number(tmp_path, corpus, choices):
    scoring = run_config(corpus, evaluate={"every_steps": 3, "tasks": (str(choices),), "task_limit": 8})
    records = train_in(World(), scoring, EAGER, tmp_path / "scoring")
    scores = {record["step"]: record["tasks"] for record in records if "validation_loss" in record}
    report = json.loads((tmp_path / "scoring" / "report.json").read_text())
    assert scores.keys() == {2, 5, 7} and report["tasks"] == scores[7]
    assert (scores[7]["choices"]["acc"] * 8).is_integer()
    reader = RunReader.read(tmp_path / "scoring")
    assert reader.evaluations["tasks.choices.acc"].tolist() == [scores[step]["choices"]["acc"] for step in (2, 5, 7)]
    assert metric_of(tmp_path / "scoring", "tasks.choices.acc", 0) == scores[7]["choices"]["acc"]
    assert evaluation_values({"tasks": scores[2]})["tasks/choices/acc"] == scores[2]["choices"]["acc"]
    plain = train_in(World(), run_config(corpus), EAGER, tmp_path / "plain")
    assert losses(records) == losses(plain)
