"""What tables of the run file say of each other, each refusal with its remedy."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from argosy.config.schema import RunConfig

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
