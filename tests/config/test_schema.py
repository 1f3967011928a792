"""What tables of the run file say of each other, each refusal with its remedy."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.config.section import LONGEST_S, dotted, key_fields
from argosy.errors import UserError

REWARD = {"train": {"objective": "reward", "steps": 10}, "model": {"score": True}}
SITES = [{"name": "a", "address": "127.0.0.1:1"}, {"name": "b", "address": "127.0.0.1:2"}]


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"train": {"objective": "dpo"}, "resilience": {"replay_check_every_steps": 5}},
         'a replay does not know what train.objective = "dpo" takes from the whole batch; set it to 0'),
        ({"train": {"objective": "dpo"}, "model": {"mtp": {"modules": 1}}}, "compares whole answers; set 0"),
        ({"train": {"objective": "reward"}}, "trains a head that gives one number; set score = true"),
        (REWARD | {"evaluate": {"tasks": ["arc_easy"]}}, "ask for words, and a reward model ends with a score; leave"),
        (REWARD | {"lora": {"rank": 4}}, "the head is trained whole, and checkpoints of adapters have no place for it"),
        ({"train": {"objective": "dpo"}, "sites": SITES}, "leave the sites out, or set objective"),
        ({"train": {"minutes": 5.0}, "schedule": {"warmup_fraction": 0.1, "warmup_steps": 0}},
         "schedule.warmup_fraction = 0.1 with train.minutes: how many steps fit is known at the end of the warmup"),
        ({"observe": {"sample_every_steps": 5}}, "observe.sample_every_steps = 5 needs evaluate.sample_prompt"),
        ({"data": {"seq_len": 64}, "model": {"max_seq_len": 32}},
         "data.seq_len = 64 is more than model.max_seq_len = 32; try 32 or less"),
        ({"model": {"ffn_gate": False}}, "the family llama has a gate; set ffn_gate = true"),
        ({"model": {"family": "nemotron", "activation": "relu2"}}, "the family nemotron has no gate; set ffn_gate"),
        ({"resilience": {"memory_checkpoint_every_steps": True}}, 'must be "auto", or a whole number of steps'),
        ({"resilience": {"memory_checkpoint_every_steps": -1}}, 'must be "auto", or a whole number of steps'),
        ({"name": "../x"}, "String should match pattern"),
    ],
)  # fmt: skip
def test_tables_that_do_not_go_together_are_refused_with_a_remedy(run: dict[str, Any], said: str) -> None:
    steps = {} if "minutes" in run.get("train", {}) else {"steps": 10}
    with pytest.raises(ValidationError) as refused:
        RunConfig.model_validate(run | {"train": steps | run.get("train", {})})
    assert said in str(refused.value)


@pytest.mark.parametrize("value", ["auto", 0, 5])
def test_in_memory_checkpoints_come_by_themselves_or_by_steps(value: object) -> None:
    run = RunConfig.model_validate({"resilience": {"memory_checkpoint_every_steps": value}})
    assert run.resilience.memory_checkpoint_every_steps == value


TIMES = [dotted(key) for key in key_fields(RunConfig) if str(key[-1]).endswith("_s")]


@pytest.mark.parametrize("key", TIMES)
def test_a_time_that_timers_cannot_count_is_refused(key: str) -> None:
    load(None, {key: LONGEST_S})
    with pytest.raises(UserError, match=rf"{key} = .* of at most 1e\+09"):
        load(None, {key: 2 * LONGEST_S})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.seq_len", 5 * 10**9),
        ("data.prepare.seq_len", 5 * 10**9),
        ("data.prepare.vocab_size", 9 * 10**11),
        ("train.global_batch", 4 * 10**18),
        ("seed", 9 * 10**18),
    ],
)
def test_a_size_that_no_machine_can_make_is_refused(key: str, value: int) -> None:
    with pytest.raises(UserError, match=rf"{key} = {value}: must be a whole number .* of at most \d+\."):
        load(None, {key: value})


@pytest.mark.parametrize("key", ["train.minutes", "train.epochs"])
def test_a_run_that_no_number_of_steps_would_fill_is_refused(key: str) -> None:
    with pytest.raises(UserError, match=rf"{key} = 1e\+300: must be a finite number .* of at most 1e\+0\d\."):
        load(None, {"train.steps": 0, key: 1e300})
