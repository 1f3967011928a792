"""Argosy's options. Every key of a run is one; a file and the command line obey the same rules."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import tyro

from argosy import cli
from argosy.cli import compare, generate
from argosy.cli.options import ESSENTIAL, must_be_folder, parse, parse_run, parse_section
from argosy.config.data import PrepareConfig
from argosy.config.load import load
from argosy.config.section import Count, WholeCount, dotted
from argosy.errors import UserError


@dataclass(frozen=True)
class Extra:
    """What a command adds."""

    run_dir: Path | None = None
    """Folder of the run."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Sized:
    """Options that take large numbers."""

    tokens: Count | None = None
    max_tokens: WholeCount = 200


class Prepare(PrepareConfig):
    """Options of a command that takes one section."""

    input: tyro.conf.Positional[tuple[str, ...]] = ()


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('name = "mine"\n[data.sources]\n"a" = 1\n[train]\nsteps = 7\n')
    return tmp_path / "run.toml"


def run_with(*argv: str):
    return parse_run(list(argv), "argosy test", Extra)[1]


def refusal(*argv: str) -> str:
    with pytest.raises(UserError) as error:
        run_with(*argv)
    return str(error.value)


def test_without_options_it_is_what_load_gives(run_file):
    assert parse_run([], "argosy test", Extra) == (Extra(), load())
    assert run_with("run.toml") == load("run.toml")


def test_a_key_that_is_typed_counts_even_if_it_repeats_the_files_value(run_file):
    layers = load("demo").model.layers
    run = run_with("demo", "--model.preset", "llama-60m", "--model.layers", str(layers))
    assert (run.model.layers, run.model.width) == (layers, 640)


def test_an_option_that_may_be_left_out_is_shown_by_what_it_takes(capsys):
    with pytest.raises(SystemExit):
        run_with("--help")
    assert "--run-dir PATH" in capsys.readouterr().out


def test_the_commands_own_options_stand_beside_the_keys(run_file):
    extra, run = parse_run(["run.toml", "--run-dir", "x", "--train.steps", "9", "--json"], "argosy test", Extra)
    assert extra == Extra(Path("x"), True)
    assert (run.name, run.train.steps) == ("mine", 9)


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("--checkpoint.every-steps 5", "checkpoint.every_steps", 5),
        ("--checkpoint.every_steps=5", "checkpoint.every_steps", 5),
        ("--checkpoint.background false", "checkpoint.background", False),
        ("--optimizer.lr 1e-4", "optimizer.lr", 1e-4),
        ("--train.global-batch 1e3", "train.global_batch", 1000),
        ("--evaluate.tokens 1.5M", "evaluate.tokens", 1_500_000),
        ("--data.prepare.max-text-bytes 2G", "data.prepare.max_text_bytes", 2_000_000_000),
        ("--name 7k", "name", "7k"),
        ("--schedule.kind cosine", "schedule.kind", "cosine"),
        ("--plan tp=2,dp_shard=4", "plan", "tp=2,dp_shard=4"),
        ("--name 7", "name", "7"),
        ("--data.sources /p 1 /q 2.5", "data.sources", {"/p": 1.0, "/q": 2.5}),
        ("--data.prepare.input /a /b*", "data.prepare.input", ("/a", "/b*")),
        ("--data.prepare.tokenizer none", "data.prepare.tokenizer", None),
        ("--evaluate.sample-prompt none", "evaluate.sample_prompt", None),
        ("--model.preset llama-20m", "model.width", 512),
    ],
)
def test_a_key_is_an_option(words, key, value):
    found = run_with("demo", *words.split(" "))
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--train.steps -1", "--train.steps = -1: must be a whole number of at least 0."),
        ("--train.steps ten", '--train.steps = "ten": must be a whole number of at least 0.'),
        ("--schedule.kind cosin", '--schedule.kind = "cosin": must be one of "cosine", "wsd", "constant".'),
        ("--model.kv-heads 3", "--model.kv_heads = 3 does not divide heads = 4"),
        ("--model.preset llama-6m", '--model.preset = "llama-6m": no model preset is called'),
        ("--train.stpes 4", "--train.stpes: unknown option; did you mean --train.steps?"),
        ("--learning-rate 4", "--learning-rate: unknown option; here it is --optimizer.lr."),
        ("--model llama3-8b", "--model: unknown option; here it is --model.preset."),
        ("--resume", "--resume: unknown option; here it is the default: the same command goes on"),
        ("--rundir 4", "--rundir: unknown option; did you mean --run-dir?"),
        (
            "--data.sources data/mine",
            "--data.sources 'data/mine': must be pairs of a path and its weight, as in --data.",
        ),
        ("--data.stages 4", "--data.stages: no option; set it in the run file."),
        ("other.toml", "other.toml: unexpected; options begin with --, and RUN comes first."),
    ],
)
def test_a_wrong_option_is_refused_in_one_message(words, message):
    assert refusal("demo", *words.split(" ")).startswith(message)


def test_what_tyro_refuses_is_one_message():
    text = refusal("demo", "--train.steps")
    assert text.endswith("'--train.steps'. Expected 1 values.\n  All options: argosy test --help")
    with pytest.raises(UserError) as error:
        parse(["a"], "argosy compare", compare.Options)
    assert str(error.value) == (
        "Missing from argosy compare:\n  PATH: The other run's folder.\n  All options: argosy compare --help"
    )


def test_a_text_without_its_option_is_shown_where_it_belongs():
    with pytest.raises(UserError, match=r"^once more: unexpected; .*, as --prompt 'once more'"):
        parse(["runs/a", "once more"], "argosy generate", generate.Options)


def helped(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as stop:
        run_with(*argv)
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("word", ["--help", "--help-all"])
def test_help_shows_the_values_in_force(word, run_file, capsys):
    text = helped(capsys, "run.toml", word)
    assert "Every key of a run is one" in text
    assert "--run-dir" in text
    assert "optimizer steps" in text
    assert "(default: mine)" in text


def test_help_shows_the_essential_keys_and_how_to_see_all(capsys):
    essential = {"--" + dotted(key).replace("_", "-") for key in ESSENTIAL}
    text = helped(capsys, "--help")
    assert essential | {"--run-dir", "--json", "--help"} == set(re.findall(r"^│ .*?(--[a-z.-]+)", text, re.M))
    assert "--help-all" in text and "argosy config show" in text
    everything = helped(capsys, "--help-all")
    assert all(option in everything for option in essential | {"--resilience.hang-s", "--model.rope-scaling.kind"})


def test_a_command_does_not_show_keys_without_effect_on_it(capsys):
    with pytest.raises(SystemExit):
        parse_run(["--help"], "argosy test", Extra, idle=("train.steps",))
    assert "--train.steps" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("batch size", "--train.global-batch"),
        ("sequence length", "--data.seq-len"),
        ("context length", "--data.seq-len"),
        ("learning rate", "--optimizer.lr"),
        ("epochs", "--train.epochs"),
        ("model size", "--model.preset"),
        ("fine-tuning", "--model.weights"),
        ("dataset", "--data.sources"),
        ("validation loss", "--evaluate.every-steps"),
        ("checkpoints", "--checkpoint.every-steps"),
        ("GPUs", "--launch.processes"),
        ("precision", "--plan"),
        ("micro batch", "--plan"),
        ("random seed", "--seed"),
    ],
)
def test_the_words_that_people_search_for_stand_beside_the_option(words, option, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = helped(capsys, "--help").replace("│", " ")
    meaning = re.search(rf"^  {option} (.*?)^  -", text + "\n  -", re.M | re.S)
    assert meaning and words.lower() in " ".join(meaning[1].lower().split())


@pytest.mark.parametrize("command", ["train", "parity", "chaos", "simulate"])
def test_help_fits_two_screens_of_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 80


def test_a_section_can_be_the_options_of_a_command():
    argv = ["a.txt", "b/*", "--vocab-size", "300", "--json"]
    extra, section = parse_section(argv, "argosy test", Extra, Prepare)
    assert extra.json
    assert (section.input, section.vocab_size, section.field) == (("a.txt", "b/*"), 300, ("text",))
    with pytest.raises(UserError, match="--vocab_size = 0: must be a whole number above 0"):
        parse_section(["--vocab-size", "0"], "argosy test", Extra, Prepare)


@pytest.mark.parametrize("words", [["--tokens", "1.5T"], ["--tokens=1.5T"], ["--tokens", "1.5e12"]])
def test_a_large_number_is_typed_as_people_write_it(words):
    assert parse([*words, "--max-tokens", "30k"], "argosy test", Sized) == Sized(1.5e12, 30_000)


@pytest.mark.parametrize("option", ["--tokens", "--max-tokens"])
def test_a_large_number_that_is_none_is_refused_in_a_sentence(option):
    with pytest.raises(UserError, match=f"^{option} 1X: '1X' is no number; try 30000, 30k, 7.1M, 161B or 1T.$"):
        parse([option, "1X"], "argosy test", Sized)


def test_a_command_without_a_run_has_its_own_options():
    assert parse(["--run-dir", "x"], "argosy test", Extra) == Extra(Path("x"))
    with pytest.raises(UserError, match="--jsn: unknown option; did you mean --json"):
        parse(["--jsn"], "argosy test", Extra)
    with pytest.raises(UserError, match="--gpus: unknown option; there are: "):
        parse(["--gpus", "8"], "argosy test", Extra)


def test_a_url_where_a_folder_is_read_is_told_from_a_folder_that_is_not_there(tmp_path: Path):
    must_be_folder(tmp_path)
    must_be_folder("hf://owner/name", or_url=True)
    with pytest.raises(UserError, match=f"^{tmp_path}/none: no such folder. Name one with a run, a checkpoint"):
        must_be_folder(tmp_path / "none", or_url=True)
    with pytest.raises(UserError, match=r"^hf://owner/name: a URL, and this reads a folder\. .*checkpoint import"):
        must_be_folder(Path("hf://owner/name"))
