"""Extensions in whole runs, as a user writes them: the examples work, and what is wrong is told with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from argosy.observe.events import Metrics, read_lines
from commands import Folder

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "extend"
HEAD = "from argosy import extend\n\n"


def write_run(folder: Folder, *files: str, **keys: Any) -> Path:
    """A run file whose table `extend` names these files."""
    path = folder.write_run(**{"every_steps": 5, **keys})
    path.write_text(f"{path.read_text()}\n[extend]\nfiles = {json.dumps([str(file) for file in files])}\n")
    return path


def lines(folder: Folder, name: str = "tiny") -> list[dict[str, Any]]:
    return [record for record in Metrics(folder.path / "runs" / name).read() if "loss" in record]


def test_callbacks_metrics_and_sinks_of_the_examples_run_and_a_resumed_run_repeats_itself(folder):
    names = ("callbacks.py", "metrics.py", "sinks.py")
    for name in names:
        (folder.path / name).write_bytes((EXAMPLES / name).read_bytes())
    run = write_run(folder, *names, steps=5)
    said = folder.argosy("train", run, "--observe.sinks", "csv")
    assert "callbacks.py (" in said
    assert ": 2 callbacks" in said
    assert set(lines(folder)[0]["user"]) == {"perplexity", "embedding_rows_used"}
    assert 0 < lines(folder)[0]["user"]["embedding_rows_used"] < 1
    evaluations = (folder.path / "runs" / "tiny" / "evaluations.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in evaluations] == ["4"]
    losses = (folder.path / "runs" / "tiny" / "losses.csv").read_text().splitlines()
    assert losses == [f"{line['step']},{line['loss']}" for line in lines(folder)]

    # Another file of that name is refused, and taken where that is accepted.
    (folder.path / "callbacks.py").write_text(f"{HEAD}@extend.callback('save')\ndef saved(run): run.log(saved=1)\n")
    said = folder.argosy_here("train", run, "--train.steps", 7, code=2)
    assert "extend callbacks.py: sha256" in said
    assert "--accept-changes" in said
    folder.argosy_here("train", run, "--train.steps", 12, "--accept-changes")
    assert lines(folder)[10]["user"].keys() == {"embedding_rows_used", "saved"}  # saved after step 9, and logged then
    assert len(list((folder.path / "runs" / "tiny" / "extend").glob("*/callbacks.py"))) == 2

    # The copy in the folder was changed by hand.
    (copy,) = (folder.path / "runs" / "tiny" / "extend").glob("*/metrics.py")
    copy.write_text(copy.read_text() + "\n")
    assert "was changed. Restore it" in folder.argosy_here("train", "runs/tiny/run.toml", code=2)


@pytest.mark.slow
def test_own_loss_optimizer_and_text_survive_a_killed_rank_bit_for_bit(folder):
    names = ("losses.py", "optimizers.py", "sources.py")
    for name in names:
        (folder.path / name).write_bytes((EXAMPLES / name).read_bytes())
    run = write_run(folder, *names, steps=8, every_steps=3)
    text = run.read_text().replace(f'sources = {{ "{folder.corpus}" = 1.0 }}\n', "")
    text = text.replace(
        "[train]", '[data.prepare]\ninput = ["source:sums:3000"]\nvocab_size = 300\n\n[train]\nloss = "z_loss"'
    )
    text = text.replace("lr = 1e-2", 'lr = 0.5\nkind = "sgd"')
    run.write_text(text.replace("dp_replicate=2,", "dp_shard=2,zero=2,"))
    folder.argosy("train", run)
    process = folder.start("train", run, "--name", "killed", ARGOSY_FAULTS="kill@optimizer:step=5,rank=1")
    assert process.wait(120) == 0, process.communicate()
    assert [line["loss"] for line in lines(folder, "killed")] == [line["loss"] for line in lines(folder)]
    assert lines(folder)[0]["loss"] > lines(folder)[-1]["loss"]
    again = folder.argosy("replay", "runs/tiny", "--step", 7)
    assert "the same, bit for bit" in again


@pytest.mark.slow
def test_code_that_raises_or_does_not_repeat_itself_is_told_and_the_run_goes_on(folder):
    (folder.path / "mine.py").write_text(
        f"{HEAD}import torch\n@extend.loss('noisy', deterministic=False)\ndef f(logits, targets):\n"
        "    losses = torch.nn.functional.cross_entropy(logits, targets, reduction='none')\n"
        "    return losses * (1 + torch.rand(()))\n"
        "@extend.callback('after_step')\ndef boom(run):\n    if run.step == 2: raise KeyError('oops')\n"
    )
    run = write_run(folder, "mine.py", steps=4, processes=1)
    said = folder.argosy("train", run, "--train.loss", "noisy")
    assert "mine.py:10: the callback boom raised KeyError: 'oops', at step 2; it is switched off" in said
    assert len(lines(folder)) == 4
    found = read_lines(folder.path / "runs" / "tiny" / "events" / "rank-0.jsonl")
    assert [event["what"] for event in found if event["event"] == "user_code_off"] == ["callback boom"]

    assert "not deterministic: loss noisy. No replay or resumed run repeats its numbers" in said
    report = json.loads((folder.path / "runs" / "tiny" / "report.json").read_text())
    assert report["not_deterministic"][0].startswith("loss noisy (")
    refused = folder.argosy_here("replay", "runs/tiny", "--step", 1, code=2)
    assert "the loss noisy" in refused
    assert "is declared not deterministic" in refused
    for command in ("parity", "chaos"):
        refused = folder.argosy_here(command, run, "--train.loss", "noisy", code=2)
        assert "tiny: the loss noisy" in refused and "is declared not deterministic" in refused


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "extend.files = {path}: cannot be read (No such file or directory)"),
        ("def f(:", "{path}:3: not Python: invalid syntax"),
        ("@extend.hook('save')\ndef f(run): ...", "{path}:3: there is no @extend.hook; there are: callback, metric"),
        ("@extend.metric('a')\ndef f(): ...", "{path}:3: a metric takes 1 argument, and f takes ()"),
        (
            "@extend.metric('a')\ndef f(run): ...\n@extend.metric('a')\ndef g(run): ...",
            "{path}:5: the metric a is declared already, at {path}:3; give one of them another name",
        ),
    ],
)
def test_a_mistake_is_refused_with_its_line_before_anything_is_written(folder, refused, text, said):
    path = folder.path / "mine.py"
    if text is not None:
        path.write_text(HEAD + text)
    run = write_run(folder, "mine.py")
    written = refused("train", run, said=(said.format(path=path), f"{run}:"))
    assert len(written.splitlines()) == 1


def test_two_files_of_one_name_are_refused(folder, refused):
    for sub in ("a", "b"):
        (folder.path / sub).mkdir()
        (folder.path / sub / "mine.py").write_text(f"{HEAD}@extend.metric('{sub}')\ndef f(run): return 1\n")
    refused("train", write_run(folder, "a/mine.py", "b/mine.py"), said=("files names two of the name mine.py",))


def test_an_unknown_package_is_refused(folder, refused):
    run = folder.write_run()
    refused(
        "train",
        run,
        "--extend.packages",
        "moonshot",
        said=("--extend.packages", "moonshot: there is no such entry point"),
    )


@pytest.mark.slow
def test_a_file_that_fails_to_import_ends_the_run_with_its_line(folder):
    (folder.path / "mine.py").write_text(f"{HEAD}import nothing_here\n@extend.metric('a')\ndef f(run): return 1\n")
    said = folder.argosy("train", write_run(folder, "mine.py", processes=1), code=2)
    assert "mine.py:3: ModuleNotFoundError" in said


def test_code_of_a_foreign_run_is_run_only_where_the_user_trusts_it(folder, monkeypatch):
    mark = folder.path / "ran"
    (folder.path / "mine.py").write_text(
        f"{HEAD}import torch\nopen({str(mark)!r}, 'a').close()\n"
        "@extend.family('evil')\ndef f(x): return torch.nn.functional.silu(x)\n"
    )
    run = write_run(folder, "mine.py", steps=3, processes=1)
    text = run.read_text().replace("[model]", '[model]\nfamily = "evil"')
    run.write_text(f"{text}\n[observe.alerts]\ncommand = ['touch', '{folder.path / 'alerted'}']\ndisk_free_gb = 1e9\n")
    folder.argosy_here("train", run)
    (folder.path / "runs" / "tiny").rename(folder.path / "theirs")
    mark.unlink()
    (folder.path / "alerted").unlink()  # the owner's

    monkeypatch.setenv("XDG_STATE_HOME", str(folder.path / "state of another user"))
    commands = {
        "generate": ("theirs",),
        "evaluate": ("theirs",),
        "checkpoint": ("export", "theirs", "--out", "hf"),
        "replay": ("theirs", "--step", 2),
        "parity": ("theirs/run.toml",),
        "simulate": ("theirs/run.toml",),
        "chaos": ("theirs/run.toml",),
    }
    for command, words in commands.items():
        said = folder.argosy_here(command, *words, code=2)
        assert "mine.py: code of the run (sha256" in said, command
        assert "--trust-code" in said
    folder.argosy_here("plan", "theirs/run.toml", "--cluster", "1xh100")
    assert not mark.exists()
    assert not any((folder.path / name).exists() for name in ("hf", "runs/tiny-chaos"))

    assert "the same, bit for bit" in folder.argosy_here("replay", "theirs", "--step", 2, "--trust-code")
    assert mark.exists()
    assert not (folder.path / "alerted").exists()  # a repetition tells nobody
    assert "loss" in folder.argosy_here("evaluate", "theirs")
