"""How gradients are summed, in words."""

from __future__ import annotations

import pytest

from argosy.config.schema import RunConfig
from argosy.plan.plan import Plan
from argosy.plan.report.explain import sums_in_words

RUN = RunConfig.model_validate(
    {
        "model": {"layers": 4, "width": 1024, "heads": 8, "kv_heads": 8, "head_width": 128, "ffn_width": 4096},
        "data": {"seq_len": 128},
        "train": {"steps": 1, "global_batch": 64},
    }
)


@pytest.mark.parametrize(
    ("plan", "messages", "how", "sent"),
    [
        ("dp_replicate=4,bucket_mb=16", "buckets of 16 MiB", "across 4 replicas", " GiB across"),
        (
            "dp_replicate=8,dp_shard=2,zero=1,sum_inside=2,sum_between=2,sync=int8",
            "buckets of 4 MiB",
            "among 2 ranks that share the state, then among 2 neighbours, then between 2 groups of them, then across 2 "
            "groups in int8",
            " GiB between their groups, ",
        ),
        ("dp_shard=4", "layer by layer (FSDP2)", "among 4 ranks that share the state", "among ranks that share"),
    ],
)
def test_each_tier_has_its_words_and_bytes(plan, messages, how, sent):
    words = sums_in_words(Plan.parse(plan), RUN)
    assert words is not None
    assert words[0] == messages
    assert words[1].startswith(f"{how}; a rank sends in a step ") and sent in words[1]


def test_without_data_parallelism_there_is_nothing_to_say():
    assert sums_in_words(Plan.parse("tp=4"), RUN) is None
