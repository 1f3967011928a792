"""Steps of each objective are those of TRL's trainer, from the same weights and on the same tokens."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest

from argosy.data.packing import MISMATCHED_BIT, REJECTED_BIT, START_BIT, TRAINED, Words
from argosy.models.microbatch import compared_microbatches, microbatches
from argosy.parallel.world import World
from chats import SEQ_LEN, VOCABULARY, reference_of, rows_of
from tiny import decoder, eager, made_step, train_step
from workers import WorkerPool

STEPS, LR, EPS, BATCH = 5, 2e-3, 1e-6, 4
"""BATCH: rows a step, each with a pair, a judged answer and one to another prompt, or two conversations."""
EXPERTS = {"family": "mixtral", "ffn_width": 16, "moe": {"experts": 4, "expert_ffn_width": 16, "aux_coefficient": 0.0}}
KINDS: dict[str, dict[str, Any]] = {"dense": {}, "experts": EXPERTS}
PREFERENCE = {"undesirable_weight": 1.5, "centring": 0.05}
OBJECTIVES = ("sft", "dpo", "ipo", "simpo", "orpo", "kto", "reward")
Example = dict[str, Any]


def examples_of(objective: str) -> list[Example]:
    """The data as TRL's collators take them: prompts, and answers with what is thought of them."""
    random = np.random.default_rng(0)

    def ids(low: int, high: int) -> list[int]:
        return [int(i) for i in random.integers(1, VOCABULARY, int(random.integers(low, high)))]

    if objective == "sft":
        pairs = [(ids(5, 9), ids(6, 9)) for _ in range(2 * BATCH * STEPS)]  # three do not fit a row
        return [{"input_ids": p + a, "labels": [-100] * len(p) + a} for p, a in pairs]
    prompts = [ids(2, 8) for _ in range(BATCH * STEPS)]
    if objective == "orpo":  # TRL also learns the prompt; of one with a single token there is nothing to learn
        prompts = [prompt[:1] for prompt in prompts]
    if objective != "kto":
        return [{"prompt_ids": prompt, "chosen_ids": ids(1, 6), "rejected_ids": ids(1, 6)} for prompt in prompts]
    answers = [ids(1, 6) for _ in prompts]
    return [
        {
            "prompt_ids": prompt,
            "completion_ids": answers[n],
            "KL_completion_ids": answers[n - 1 if n % BATCH else n + BATCH - 1],
            "label": n % 3 != 0,
        }
        for n, prompt in enumerate(prompts)
    ]


def sequence(prompt: list[int], answer: list[int], mark: int = 0) -> Words:
    words = np.array([*prompt, *(i | TRAINED for i in answer)], np.int32)
    words[0] |= START_BIT | mark
    return words


def row_of(*sequences: Words) -> np.ndarray:
    return rows_of([np.concatenate(sequences)])


def rows(objective: str) -> np.ndarray:
    """The same data as rows of ours."""
    found, examples = [], examples_of(objective)
    if objective == "sft":
        cut = [(e["input_ids"], e["labels"].count(-100)) for e in examples]
        whole = [sequence(words[:n], words[n:]) for words, n in cut]
        found = [row_of(*whole[n : n + 2]) for n in range(0, len(whole), 2)]
    for one in [] if objective == "sft" else examples:
        if objective == "kto":
            judged = sequence(one["prompt_ids"], one["completion_ids"], 0 if one["label"] else REJECTED_BIT)
            found.append(row_of(judged, sequence(one["prompt_ids"], one["KL_completion_ids"], MISMATCHED_BIT)))
        else:
            chosen = sequence(one["prompt_ids"], one["chosen_ids"])
            found.append(row_of(chosen, sequence(one["prompt_ids"], one["rejected_ids"], REJECTED_BIT)))
    assert all(len(row) == 1 for row in found)
    return np.concatenate(found)


def ours(world: World, plan: str, objective: str, kind: str) -> list[float]:
    """Loss and gradient norm of each step."""
    layout, said = eager(plan), []
    keys = model_keys(objective, kind)
    step = train_step(
        world,
        layout,
        model=keys,
        train={"objective": objective, "global_batch": BATCH},
        optimizer={"eps": EPS},
        data={"seq_len": SEQ_LEN},
        preference=PREFERENCE,
    )
    of_all = rows(objective)
    known = reference_of(decoder(**keys), of_all) if objective != "sft" else None
    for number in range(STEPS):
        part = slice(*layout.rows_of(step.state.model.dp_rank, BATCH).indices(BATCH)[:2])
        mine = of_all[number * BATCH :][part]
        if known is None:
            batch = microbatches(mine, layout.microbatch, 0, world.device)
        else:
            values = known[number * BATCH :][part]
            batch = compared_microbatches(mine, layout.microbatch, world.device, objective == "kto", values)
        said += made_step(step, batch, LR)
    return said


def model_keys(objective: str, kind: str) -> dict[str, Any]:
    return {**KINDS[kind], "score": True} if objective == "reward" else KINDS[kind]


@cache
def theirs(objective: str, kind: str) -> list[float]:
    """The same by TRL."""
    from trl_steps import steps_of_trl  # seconds, which the workers have no need of

    model = decoder(**model_keys(objective, kind))
    return steps_of_trl(objective, model, examples_of(objective), steps=STEPS, lr=LR, eps=EPS, preference=PREFERENCE)


def slow(*values: str) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def is_quick(objective: str, plan: str) -> bool:
    """True for one process, and for a plan with one objective: test_preferences has the others under such plans."""
    return not plan or (objective, plan) == ("sft", "cp=2")


@pytest.mark.parametrize(
    ("objective", "plan"),
    [
        pytest.param(*row, marks=() if is_quick(*row) else pytest.mark.slow)
        for row in itertools.product(OBJECTIVES, ["", "cp=2", "tp=2", "pp=2,microbatch=2", "dp_shard=2,zero=3"])
    ],
)
def test_steps_are_those_of_trl(workers: WorkerPool, objective: str, plan: str) -> None:
    said = theirs(objective, "dense")
    for found in workers.run(eager(plan).world_size, ours, plan, objective, "dense"):
        assert found[::2] == pytest.approx(said[::2], rel=1e-5)
        assert found[1::2] == pytest.approx(said[1::2], rel=1e-3)


@pytest.mark.parametrize("objective", ["sft", *slow(*OBJECTIVES[1:-1])])
def test_experts_on_two_ranks_are_those_of_trl(workers: WorkerPool, objective: str) -> None:
    said = theirs(objective, "experts")
    for found in workers.run(2, ours, "dp_shard=2,ep=2,zero=1", objective, "experts"):
        assert found[::2] == pytest.approx(said[::2], rel=1e-5)
