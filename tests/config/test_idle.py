"""Keys that a run does not read under its other keys: who gives one is told, with file, line and what would read it."""

import warnings
from pathlib import Path
from typing import get_args

import pytest

from argosy.cli.options import parse_run
from argosy.cli.train import Options
from argosy.config.dump import save_run
from argosy.config.idle import GIVEN, LEFT_OUT, PLAN, READ_WITH, SEVERAL, SYNC, idle_keys
from argosy.config.load import load
from argosy.config.optimizer import OPTIMIZERS
from argosy.config.schema import RunConfig
from argosy.config.section import key_fields, key_of, meanings, sections, value_type
from argosy.errors import ArgosyWarning
from argosy.plan.plan import Plan
from argosy.plan.sync import COMPRESSED, SYNC_WORDS
from argosy.sinks.table import SINKS

OTHERS = ("balance", "beta1", "beta2", "window", "short_divisors", "long_divisors")
"""Keys whose texts begin so though they choose, are read under all words, or are refused under others."""
ROWS = [row for row in READ_WITH if row[0] != "plan"]
SINGLE = [key_of(f"{table}.{name}") for table, names, _, _ in ROWS for name in names.split() if name != "*"]
RULED = {f"{PLAN}{word}": get_args(Plan.model_fields[word].annotation) for word in ("schedule", "recompute")} | {
    SYNC: SYNC_WORDS,
    "optimizer.kind": OPTIMIZERS,
    "observe.sinks": tuple(SINKS),
}
"""Keys that choose, beside those whose type has their words."""


def words_of(chooser: str) -> tuple[str, ...]:
    kind = value_type(key_fields(RunConfig)[key_of(chooser)]) if chooser not in RULED else None
    kinds = get_args(kind)
    return RULED.get(chooser) or (get_args(kinds[0]) if ... in kinds else kinds)


def test_each_key_and_word_of_the_table_exists():
    for table, names, choosers, words in READ_WITH:
        assert key_of(table) in sections(RunConfig) or table == "plan"
        if words not in (GIVEN, LEFT_OUT, SEVERAL):
            assert set(words.split()) < set(words_of(choosers)), (table, names)
    assert set(SINGLE) <= key_fields(RunConfig).keys()
    of_plans = {word for table, names, _, _ in READ_WITH if table == "plan" for word in names.split()}
    assert of_plans <= Plan.model_fields.keys()


def test_the_table_agrees_with_texts_that_begin_with_the_words_under_which_a_key_is_read():
    by_words = [row for row in ROWS if row[3] not in (GIVEN, LEFT_OUT)]
    told = {key_of(f"{table}.{n}"): {*words.split()} for table, names, _, words in by_words for n in names.split()}
    known = {key_of(table): {*words_of(chooser)} for table, _, chooser, words in by_words}
    found = 0
    for key in key_fields(RunConfig):
        text = meanings(sections(RunConfig)[key[:-1]]).get(str(key[-1]), "")
        before, colon, _ = text.partition(":")
        words = {word.removesuffix(" with local_steps") for word in before.split(", ")}
        if colon and words < known.get(key[:-1], set()) and key[-1] not in OTHERS:
            found += 1
            assert words <= told[key] and all(word in text for word in told[key]), key
    assert found > 25
    assert told[key_of("sync.exact_steps")] == {*COMPRESSED}


def test_an_option_and_a_line_that_have_no_effect_are_told_and_what_would_read_them(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text("[optimizer]\nmomentum = 0.5\n[train]\nsteps = 9\n")
    with pytest.warns(ArgosyWarning) as told:
        parse_run([str(path), "--sync.density", "0.1", "--lora.alpha", "8", "--train.minutes", "3"], "", Options)
    assert [str(one.message).removeprefix(f"{path}") for one in told] == [
        ':2: optimizer.momentum = 0.5 has no effect with optimizer.kind = "adamw"; leave it out, or set that to muon.',
        "--train.minutes = 3.0 has no effect with train.steps = 9; leave one out.",
        "--lora.alpha = 8.0 has no effect without lora.rank; give that too, or leave it out.",
        '--sync.density = 0.1 has no effect with plan.sync = "exact"; leave it out, or set that to topk.',
    ]


def test_words_of_a_plan_that_have_no_effect_are_told(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text('plan = "dp_replicate=2,zero=1"\n')
    with pytest.warns(ArgosyWarning) as told:
        parse_run([str(path)], "", Options)
        parse_run([str(path), "--plan", "pp=1,schedule=zbv,stages_per_rank=3,recompute_every=2"], "", Options)
    assert [str(one.message).removeprefix(f"{path}") for one in told] == [
        ":1: plan.zero = 1 has no effect without plan.dp_shard or plan.cp; give that too, or leave it out.",
        '--plan: plan.schedule = "zbv" has no effect without plan.pp; give that too, or leave it out.',
        '--plan: plan.stages_per_rank = 3 has no effect with plan.schedule = "zbv"; leave it out, or set that to '
        "interleaved_1f1b or interleaved_zero_bubble.",
        "--plan: plan.recompute_every = 2 has no effect without plan.recompute; give that too, or leave it out.",
    ]


@pytest.mark.parametrize(
    "keys",
    [
        {"optimizer.kind": "muon", "optimizer.momentum": 0.5},
        {"plan": "auto, sync=topk", "sync.density": 0.1, "sync.exact_steps": 3},
        {"plan": "auto,schedule=zbv,zero=1,recompute_every=2"},
        {"plan": "pp=2,cp = 2,schedule=interleaved_1f1b,stages_per_rank=3,zero=1,recompute=full,recompute_every=2"},
        {"plan": "auto,sync=auto", "sync.density": 0.1, "sync.fragments": 2},
        {"sites": [{"name": "a"}, {"name": "b"}], "sync.every_steps": 30},
        {"observe.sinks": ["wandb", "prometheus"], "observe.wandb.project": "x", "observe.prometheus.port": 0},
        {"lora.rank": 4, "lora.alpha": 8.0},
        {"train.steps": 0, "train.epochs": 2.0},
        {"observe.alerts.command": ["tell"], "observe.alerts.timeout_s": 3.0},
    ],
    ids=str,
)
def test_keys_that_are_read_are_not_told(keys: dict[str, object]):
    assert not list(idle_keys(load("parity", keys)))


def test_what_a_preset_says_and_options_leave_without_effect_is_not_told(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text('[optimizer]\nkind = "adamw"\nmomentum = 0.5\n')
    with warnings.catch_warnings():
        warnings.simplefilter("error", ArgosyWarning)
        parse_run(["--model.preset", "llama4-maverick", "--schedule.kind", "constant"], "", Options)
        parse_run([str(path), "--optimizer.kind", "muon"], "", Options)


def test_what_the_file_says_beside_a_key_that_an_option_changes_is_not_told(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text('plan = "sync=topk"\n[sync]\ndensity = 0.1\n[train]\nminutes = 5\nsteps = 0\n')
    with warnings.catch_warnings():
        warnings.simplefilter("error", ArgosyWarning)
        parse_run([str(path), "--train.steps", "9", "--plan", "sync=int8"], "", Options)


@pytest.mark.parametrize("preset", ["llama-5m", "llama4-maverick"])
def test_the_file_of_a_runs_folder_says_nothing_in_vain(preset: str, tmp_path: Path):
    path = tmp_path / "run.toml"
    run = load(None, {"model.preset": preset, "data.sources": {"d": 1.0}})
    save_run(run.with_keys(plan="microbatch=4"), path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ArgosyWarning)
        assert parse_run([str(path)], "", Options)[1].model == run.model


def test_a_key_is_told_once_and_for_the_first_reason(tmp_path: Path):
    idle = [*idle_keys(load(None, {"model.moe.bias_rate": 0.5, "model.moe.shared_gate": True}))]
    assert sorted(key for key, _, _ in idle) == ["model.moe.bias_rate", "model.moe.shared_gate"]
    assert all("without model.moe.experts" in sentence for _, _, sentence in idle)
