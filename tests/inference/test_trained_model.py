"""A model is what its checkpoint holds, whole, or it is refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from argosy.checkpoint import store
from argosy.checkpoint.boxes import PLACES
from argosy.checkpoint.store import Checkpoint
from argosy.errors import ArgosyError, ArgosyWarning, UserError
from argosy.inference.huggingface import export_checkpoint
from argosy.inference.trained_model import evaluate, generate, open_checkpoint, stream
from argosy.launch import run_folder
from argosy.observe.events import Metrics
from argosy.observe.report import Report
from argosy.parallel.world import World
from checkpoint.saving import rewrite
from mutations import ODD_VALUES
from tiny import EAGER, SOURCES, prepare_corpus, run_config, train_in

HEAD = "model.head.weight"


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """A run with two checkpoints of the same weights."""
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    (newest,) = store.committed(copy)
    older = store.step_folder(copy, newest.step - 1)
    shutil.copytree(newest.folder, older)
    as_of = {**newest.manifest.to_record(), "step": newest.step - 1}
    (older / store.MANIFEST).write_bytes(type(newest.manifest).from_record(as_of).to_bytes())
    (older / store.VERIFIED).unlink(missing_ok=True)
    return copy


def newest(run_dir: Path) -> Checkpoint:
    return store.committed(run_dir)[-1]


def weights(run_dir: Path) -> dict[str, Tensor]:
    return dict(open_checkpoint(run_dir).model(torch.device("cpu")).state_dict())


@pytest.mark.parametrize("use", ["evaluate", "generate", "export"])
def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_name(run_dir, tmp_path, use):
    rewrite(newest(run_dir), lambda tensors, metadata: tensors.__delitem__(HEAD))
    uses: dict[str, Any] = {
        "evaluate": evaluate,
        "generate": generate,
        "export": lambda path: export_checkpoint(path, tmp_path / "out"),
    }
    with pytest.raises(UserError, match=rf"{newest(run_dir).folder.name} does not fit: {HEAD} is not there\. Name"):
        uses[use](run_dir)
    assert not (tmp_path / "out").exists()


def test_a_part_of_a_tensor_is_not_taken_for_the_whole(run_dir):
    def halve(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        rows, width = tensors[HEAD].shape
        tensors[HEAD] = tensors[HEAD][: rows // 2]
        metadata[PLACES] = json.dumps({HEAD: [HEAD, [rows, width], [0, 0]]})

    rewrite(newest(run_dir), halve)
    with pytest.raises(UserError, match=rf"{HEAD} lacks [\d,]+ of its [\d,]+ numbers"):
        weights(run_dir)


def test_places_that_cannot_be_give_way_to_the_checkpoint_before_and_that_is_said(run_dir):
    expected = weights(run_dir)
    rewrite(newest(run_dir), lambda tensors, metadata: metadata.update({PLACES: "{"}))
    with pytest.warns(ArgosyWarning, match=r"(?s)argosy\.places cannot be used.*Using step-\d+, verified just now"):
        found = weights(run_dir)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(UserError, match=r"cannot be read .*Name the run's folder instead"):
        open_checkpoint(newest(run_dir).folder)


@pytest.mark.filterwarnings("ignore::argosy.errors.ArgosyWarning")
@pytest.mark.parametrize("seed", range(40))
def test_whatever_a_file_says_of_its_tensors_the_model_is_right_or_refused(run_dir, seed):
    expected, chance = weights(run_dir), random.Random(seed)

    def change(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        name = chance.choice(sorted(name for name in tensors if name.startswith("model.")))
        shape = list(tensors[name].shape)
        place: list[Any] = [name, shape, [0] * len(shape)]
        for _ in range(chance.randrange(3)):
            place[chance.randrange(3)] = chance.choice([*ODD_VALUES, [2**70] * len(shape), [n + 1 for n in shape]])
        match chance.randrange(4):
            case 0:
                del tensors[name]
            case 1:
                tensors[name] = tensors[name][..., :-1]
            case 2:
                tensors[name + "x"] = tensors.pop(name)
        metadata[PLACES] = json.dumps({chance.choice([name, name + "x"]): place})

    rewrite(newest(run_dir), change)
    try:
        found = weights(run_dir)
    except ArgosyError:
        return
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


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
    run_folder.write(folder, run, EAGER, corpus / "tokenizer.json")
    train_in(World(), run, EAGER, folder)
    validation = Report.load(folder).validation
    assert validation["loss"] == pytest.approx(evaluate(folder, max_tokens=run.evaluate.tokens).loss, rel=1e-6)


def test_one_checkpoint_and_other_text_may_be_named(trained, corpus):
    (checkpoint,) = store.committed(trained)
    train_loss = evaluate(checkpoint.folder, corpus, split="train", max_tokens=4000).loss
    trained_to = [record["loss"] for record in Metrics(trained).read() if "loss" in record][-1]
    assert train_loss == pytest.approx(trained_to, abs=0.5)


def test_text_of_another_tokenizer_is_refused(trained, tmp_path):
    other = prepare_corpus(tmp_path, vocab_size=300)
    with pytest.raises(UserError, match="prepared with another tokenizer"):
        evaluate(trained, other)


def test_an_empty_split_is_refused(trained, tmp_path):
    tokenizer = trained / "tokenizer.json"
    other = prepare_corpus(tmp_path, tokenizer=tokenizer, input=(str(SOURCES / "errors.py"),), validation_fraction=0.0)
    with pytest.raises(UserError, match="its validation split is empty"):
        evaluate(trained, other)
    assert evaluate(trained, other, split="train").tokens > 0
