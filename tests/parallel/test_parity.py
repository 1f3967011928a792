"""Every axis, every pair of axes and some of three give the numbers of one process, for every model family.

Each row is a real run: `train` in as many gloo processes as the plan is for, from data to checkpoint, compared with
the same run in one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from argosy.compare.parity import TOLERANCE, compare
from argosy.config.schema import RunConfig
from argosy.launch import run_folder
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.plan.search.space import check_plan
from tiny import DELTA_NET, SOURCES, eager, prepare_corpus, train_in
from workers import WorkerPool

STEPS = 3
VOCABULARY = 403  # more than the tokenizer's 400, and odd: no number of ranks divides it
DENSE: dict[str, Any] = {
    "layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "head_width": 8, "ffn_width": 64, "vocab_size": VOCABULARY,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"experts": 4, "experts_per_token": 2, "expert_ffn_width": 16, "aux_coefficient": 0.1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"family": "qwen2", "qkv_bias": True, "tie_embeddings": True},
    "qwen3": {"family": "qwen3", "qk_norm": True, "tie_embeddings": True},
    "biased": {"attention_bias": True},
    "deep": {"layers": 8},  # for pipelines of 4 ranks with two stages each
    "mixtral": {"family": "mixtral", "moe": EXPERTS},
    "mup": {"mup": {"base_width": 16, "base_head_width": 4}, "tie_embeddings": True},
    "mup_experts": {"family": "mixtral", "moe": EXPERTS, "mup": {"base_width": 16}},
    "qwen3_moe": {
        "family": "qwen3_moe", "qk_norm": True, "tie_embeddings": True,
        "moe": EXPERTS | {"experts": 8, "experts_per_token": 3, "z_coefficient": 1e-2},
    },
    "deepseek_v3": {
        "family": "deepseek_v3", "kv_heads": 4,
        "mla": {"kv_rank": 16, "q_rank": 24, "rope_width": 8, "nope_width": 16, "value_width": 16},
        "moe": EXPERTS | {
            "experts": 8, "shared_experts": 1, "first_dense_layers": 1, "router": "sigmoid", "groups": 4,
            "top_groups": 2, "routed_scale": 2.5, "balance": "bias", "bias_rate": 1e-2,
        },
    },
    "mtp": {
        "family": "deepseek_v3", "kv_heads": 4, "mtp": {"modules": 2},
        "mla": {"kv_rank": 16, "q_rank": 24, "rope_width": 8, "nope_width": 16, "value_width": 16},
        "moe": EXPERTS | {"first_dense_layers": 1, "router": "sigmoid", "balance": "bias", "bias_rate": 1e-2},
    },
    "mtp_tied": {"mtp": {"modules": 1}, "tie_embeddings": True, "attention": {"layers": ["sliding"], "window": 9}},
    "gemma2": {
        "family": "gemma2", "layers": 4, "tie_embeddings": True, "activation": "gelu_tanh", "embedding_scale": 32**0.5,
        "logit_softcap": 3.0, "norms": {"place": "around", "zero_centered": True},
        "attention": {"layers": ["sliding", "full"], "window": 9, "softcap": 2.0, "scale": 0.3},
    },
    "olmo3": {
        # A norm of results that are nearly 0 would blow their rounding up.
        "family": "olmo3", "qk_norm": True, "norms": {"place": "after"}, "init_std": 0.2,
        "rope_scaling": {"kind": "yarn", "factor": 4.0},
        "attention": {
            "layers": ["sliding", "sliding", "full"], "window": 20, "norm_over": "all", "sliding_rope_scaled": False,
        },
    },
    "cohere2": {
        "family": "cohere2", "norms": {"place": "parallel", "kind": "layer"}, "logit_scale": 0.25,
        "residual_scale": 0.5, "tie_embeddings": True,
        "attention": {"layers": ["sliding", "full"], "window": 5, "rotary_layers": [True, False], "rotary_width": 4},
    },
    "nemotron": {
        "family": "nemotron", "ffn_gate": False, "activation": "relu2", "ffn_bias": True, "qkv_bias": True,
        "norms": {"kind": "layer", "bias": True, "zero_centered": True}, "attention": {"gate": True},
    },
    "gpt_oss": {
        "family": "gpt_oss", "attention_bias": True, "activation": "clamped_swiglu", "ffn_limit": 2.0,
        "attention": {"layers": ["sliding", "full"], "window": 12, "sinks": True},
        "moe": EXPERTS | {"router_bias": True, "expert_bias": True},
    },
    "qwen2_moe": {
        "family": "qwen2_moe", "qkv_bias": True,
        "moe": EXPERTS | {"shared_experts": 1, "shared_gate": True, "shared_ffn_width": 24, "every": 2},
    },
    "qwen3_next": {
        "family": "qwen3_next", "qk_norm": True, "norms": {"zero_centered": True},
        "attention": {"layers": ["linear", "linear", "linear", "full"], "gate": True, "rotary_width": 2},
        "delta_net": DELTA_NET,
        "moe": EXPERTS | {"shared_experts": 1, "shared_gate": True, "shared_ffn_width": 24},
    },
    "uneven": {
        "ffn_widths": [64, 96],
        "attention": {
            "layers": ["sliding", "full"], "window": 9, "heads": [4, 8], "kv_heads": [2, 4, 4, 4],
            "head_widths": [8, 12], "value_width": 10, "value_scale": 0.7,
        },
    },
    "shared": {
        "family": "gemma4_text", "qk_norm": True, "layer_scale": True, "norms": {"place": "around"},
        "rope_scaling": {"kind": "proportional", "rotated_share": 0.25},
        "attention": {
            "layers": ["sliding", "full"], "window": 12, "head_widths": [8, 16], "kv_heads": [2, 1],
            "keys_as_values": [False, True], "value_norm": True, "scale": 0.3, "sliding_rope_scaled": False,
        },
    },
    "llama4": {
        "family": "llama4_text", "qk_norm": True,
        "attention": {
            "layers": ["chunked", "full"], "window": 12, "rotary_layers": [True, False], "temperature": 0.5,
            "temperature_floor": 4, "norm_after_rotary": True, "norm_weights": False, "norm_unrotated": False,
        },
        "moe": EXPERTS | {
            "every": 2, "shared_experts": 1, "router": "sigmoid", "normalize_weights": False, "weigh": "inputs",
            "capacity_factor": 1.5,
        },
    },
}  # fmt: skip

QUICK = [
    ("llama", "dp_shard=2,zero=1,microbatch=2"),
    ("qwen3", "pp=2,microbatch=2"),
    ("llama", "dp_replicate=2,dp_shard=2,microbatch=2"),
    ("llama", "dp_replicate=4,sum_inside=2"),
    ("mixtral", "dp_shard=2,ep=2,recompute=selective,microbatch=4"),
    ("qwen2_moe", "dp_shard=2,ep=2,overlap_experts=true,microbatch=4"),
    ("deepseek_v3", "cp=2,ep=2,microbatch=4"),
    ("qwen3_next", "cp=2,microbatch=4"),
    ("uneven", "tp=2,microbatch=4"),
    ("mtp", "pp=2,tp=2,microbatch=2"),
]
"""Family and plan, in every run of the tests."""

LAYERS_THAT_DIFFER = [
    (family, plan)
    for family in (
        "gemma2", "olmo3", "cohere2", "nemotron", "gpt_oss", "qwen2_moe", "qwen3_next", "uneven", "shared", "llama4",
    )
    for plan in (
        "cp=2,microbatch=4", "cp=2,context=ulysses,microbatch=4", "cp=4,microbatch=4", "tp=2,microbatch=4",
        "tp=4,microbatch=4", "pp=2,microbatch=2", "dp_shard=2,zero=3,microbatch=4",
        "dp_shard=2,tp=2,zero=3,recompute=full,microbatch=4", "cp=2,pp=2,microbatch=2",
    )
] + [(family, plan) for family in ("gpt_oss", "qwen2_moe", "qwen3_next", "llama4") for plan in (
    "dp_shard=2,ep=2,microbatch=4", "dp_shard=2,tp=2,ep=2,recompute=selective,microbatch=4",
)]  # fmt: skip
"""Families whose layers differ, or have parts that others lack, on every axis."""

SLOW = [
    *(row for row in LAYERS_THAT_DIFFER if row not in QUICK),
    # One axis.
    ("llama", "dp_replicate=2"),
    ("llama", "dp_shard=2,zero=3"),
    ("llama", "cp=2,microbatch=4"),
    ("biased", "tp=2,microbatch=4"),
    ("llama", "pp=2,schedule=interleaved_1f1b,microbatch=2"),
    ("llama", "tp=4,microbatch=4"),
    ("llama", "microbatch=2"),
    ("llama", "dp_replicate=4,microbatch=2"),
    ("llama", "dp_shard=2,zero=0"),
    ("llama", "dp_shard=4,zero=1"),
    ("llama", "dp_shard=4,zero=2"),
    ("llama", "dp_shard=4,zero=3"),
    ("qwen3", "dp_shard=8,zero=3"),
    ("llama", "cp=2,context=ulysses"),
    ("llama", "cp=4,microbatch=2"),
    ("llama", "cp=4,context=ulysses,zero=2"),
    ("qwen3", "tp=2"),
    ("qwen3", "tp=4,microbatch=2"),
    ("biased", "tp=4,microbatch=2"),
    ("llama", "pp=2,schedule=gpipe"),
    ("llama", "pp=4,schedule=1f1b"),
    ("llama", "pp=2,schedule=interleaved_zero_bubble"),
    ("llama", "pp=2,schedule=zbv"),
    ("qwen3", "pp=2,schedule=zbv"),
    ("llama", "pp=2,schedule=dualpipev"),
    ("deep", "pp=4,schedule=interleaved_1f1b"),
    ("deep", "pp=4,schedule=zbv"),
    ("deep", "pp=4,schedule=dualpipev"),
    ("qwen3", "pp=4"),
    ("qwen2", "dp_replicate=2"),
    ("qwen2", "dp_shard=2,zero=1"),
    ("qwen2", "dp_shard=2,zero=2"),
    ("qwen2", "dp_shard=2,zero=3"),
    ("qwen2", "cp=2"),
    ("qwen2", "cp=2,context=ulysses"),
    ("qwen2", "tp=2"),
    ("qwen2", "tp=4,microbatch=2"),
    ("qwen2", "pp=2,schedule=zbv"),
    # Sums in tiers.
    ("llama", "dp_replicate=8,sum_inside=2,sum_between=2"),
    ("llama", "dp_replicate=4,dp_shard=2,zero=1,sum_inside=2"),
    ("qwen3", "dp_replicate=4,dp_shard=2,zero=3,sum_inside=2"),
    ("qwen2", "dp_replicate=4,tp=2,sum_inside=2"),
    ("qwen2", "dp_replicate=4,pp=2,sum_inside=2"),
    ("llama", "pp=2,dp_replicate=4,schedule=zbv,sum_inside=2"),
    ("llama", "dp_replicate=2,cp=2,zero=0,sum_inside=2,microbatch=4"),
    ("mixtral", "dp_shard=4,ep=2,zero=0,sum_inside=2"),
    ("mixtral", "dp_shard=8,ep=2,zero=0,sum_inside=2,sum_between=2"),
    ("mixtral", "dp_replicate=4,dp_shard=2,ep=2,zero=2,sum_inside=2"),
    # Multi-token prediction.
    ("mtp", "cp=2,ep=2,zero=3,microbatch=4"),
    ("mtp", "tp=4,microbatch=4"),
    ("mtp", "pp=2,dp_shard=2,zero=1,schedule=interleaved_1f1b,microbatch=2"),
    ("mtp", "dp_shard=2,ep=2,recompute=full,microbatch=2"),
    ("mtp", "dp_shard=2,tp=2,ep=2,zero=2,microbatch=4"),
    ("mtp", "pp=2,dp_shard=2,zero=3,microbatch=2"),
    ("mtp", "cp=2,context=ulysses,microbatch=4"),
    ("mtp_tied", "pp=2,microbatch=2"),
    ("mtp_tied", "pp=2,dp_shard=2,microbatch=2"),
    ("mtp_tied", "cp=2,tp=2,microbatch=4"),
    ("mtp_tied", "dp_shard=2,zero=3,offload=all,microbatch=4"),
    # Two.
    ("qwen3", "dp_shard=2,tp=2,microbatch=2"),
    ("qwen2", "pp=2,tp=2,microbatch=2"),
    *((family, "cp=2,tp=2,microbatch=4") for family in ("gemma2", "qwen3_next", "uneven")),
    ("llama", "dp_replicate=2,dp_shard=2,zero=1"),
    ("llama", "dp_replicate=2,dp_shard=4,zero=2"),
    ("qwen3", "dp_replicate=2,dp_shard=2,zero=3"),
    ("llama", "dp_replicate=2,cp=2,microbatch=2"),
    ("llama", "dp_replicate=2,tp=2,microbatch=2"),
    ("llama", "dp_replicate=2,pp=2"),
    ("llama", "dp_shard=2,cp=2,zero=3"),
    ("llama", "dp_shard=2,cp=2,zero=2,context=ulysses"),
    ("llama", "dp_shard=2,tp=2,zero=1"),
    ("biased", "dp_shard=2,tp=4,zero=3"),
    ("llama", "dp_shard=2,pp=2,zero=3"),
    ("qwen3", "dp_shard=2,pp=2,zero=1,schedule=interleaved_1f1b"),
    ("llama", "dp_shard=2,pp=2,zero=2,schedule=dualpipev"),
    ("llama", "cp=2,tp=2,microbatch=2"),
    ("qwen3", "cp=2,tp=2,context=ulysses,microbatch=2"),
    ("llama", "cp=2,pp=2,microbatch=2"),
    ("llama", "tp=2,pp=2,microbatch=2"),
    ("qwen3", "tp=2,pp=2,schedule=zbv,microbatch=2"),
    ("qwen2", "dp_shard=2,tp=2,zero=3"),
    # Three.
    ("llama", "pp=2,dp_shard=2,tp=2"),
    ("qwen3", "pp=2,dp_shard=2,tp=2,zero=1,schedule=interleaved_zero_bubble"),
    ("llama", "pp=2,dp_replicate=2,tp=2,schedule=zbv"),
    ("llama", "dp_shard=2,cp=2,tp=2"),
    ("llama", "dp_replicate=2,cp=2,tp=2,context=ulysses"),
    ("llama", "dp_replicate=2,dp_shard=2,tp=2"),
    ("llama", "pp=2,dp_replicate=2,dp_shard=2"),
    ("llama", "pp=2,cp=2,tp=2"),
    ("llama", "pp=2,dp_shard=2,cp=2"),
    # Uneven shares.
    ("qwen2", "dp_replicate=2,dp_shard=2,zero=3,shares=3:1"),
    ("llama", "dp_replicate=2,shares=1:3"),
    ("llama", "dp_shard=2,zero=0,shares=1:3"),
    ("qwen3", "dp_shard=2,zero=1,shares=3:1,microbatch=2"),
    ("qwen2", "dp_shard=2,zero=2,shares=3:1"),
    ("llama", "dp_replicate=2,tp=2,shares=5:3"),
    ("llama", "dp_replicate=2,cp=2,shares=1:3,microbatch=2"),
    ("qwen2", "pp=2,dp_replicate=2,shares=3:1"),
    ("llama", "pp=2,dp_replicate=2,dp_shard=2,zero=3,shares=1:1,schedule=gpipe"),
    ("llama", "pp=2,dp_replicate=2,schedule=zbv,shares=3:1"),
    ("mixtral", "dp_replicate=2,dp_shard=2,ep=2,shares=3:1"),
    ("deepseek_v3", "dp_replicate=2,tp=2,shares=1:3"),
    # What is computed twice or waits elsewhere changes no number.
    ("llama", "tp=2,recompute=full,microbatch=2"),
    ("qwen3", "dp_shard=2,tp=2,recompute=full,async_tp=true"),
    ("qwen3_next", "pp=2,tp=2,async_tp=true"),
    ("llama", "dp_shard=2,tp=2,recompute=selective"),
    ("llama", "pp=2,dp_shard=2,recompute=full,recompute_every=2"),
    ("llama", "dp_shard=2,offload=all"),
    # Factors by width.
    ("mup", "dp_shard=2,tp=2,zero=3,microbatch=2"),
    ("mup", "pp=2,dp_shard=2,zero=1,microbatch=2"),
    ("mup", "cp=2,context=ulysses"),
    ("mup_experts", "dp_shard=2,ep=2,tp=2"),
    # Experts.
    ("mixtral", "tp=2,microbatch=2"),
    ("qwen3_moe", "cp=2,microbatch=2"),
    ("qwen3_moe", "pp=2,microbatch=2"),
    ("qwen3_moe", "dp_shard=4,ep=2"),
    ("qwen3_moe", "dp_shard=4,ep=4,zero=1"),
    ("deepseek_v3", "dp_shard=2,ep=2,zero=2"),
    ("mixtral", "dp_replicate=2,dp_shard=2,ep=2"),
    ("deepseek_v3", "dp_shard=2,tp=2,ep=2"),
    ("deepseek_v3", "tp=2,pp=2,microbatch=2"),
    ("qwen3_moe", "dp_shard=2,cp=2,ep=4"),
    ("mixtral", "pp=2,dp_shard=2,ep=2"),
    ("mixtral", "pp=2,dp_shard=2,ep=2,schedule=zbv,recompute=full"),
    ("mixtral", "pp=2,dp_shard=2,ep=2,schedule=zbv,overlap_experts=true"),
    ("deepseek_v3", "dp_shard=2,tp=2,ep=2,zero=1,recompute=selective,overlap_experts=true"),
    ("gpt_oss", "dp_shard=2,ep=2,recompute=full,overlap_experts=true"),
    ("mixtral", "dp_shard=8,ep=2"),  # fewer experts on a rank than ranks that share them
    ("deepseek_v3", "cp=2,ep=2,recompute=selective"),
    ("deepseek_v3", "pp=2,dp_shard=2,tp=2,ep=2"),
    ("qwen3_moe", "dp_shard=2,cp=2,tp=2,ep=2,zero=1"),
]
"""Family and plan, in `make test-all`."""


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus whose documents are paragraphs of code: most samples hold several."""
    folder = tmp_path_factory.mktemp("documents")
    paragraphs = [text for path in sorted(SOURCES.rglob("*.py")) for text in path.read_text().split("\n\n")]
    with (folder / "paragraphs.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in paragraphs if text.strip())
    return prepare_corpus(folder / "prepared", input=(str(folder / "paragraphs.jsonl"),))


@pytest.fixture(scope="module")
def reference(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family -> the folder of its run in one process, trained when it is first asked for."""
    trained: dict[str, Path] = {}

    def run_dir(family: str) -> Path:
        if family not in trained:
            plan, run = eager("microbatch=8"), run_of(family, documents)
            trained[family] = enter(tmp_path_factory.mktemp(family), run, plan, documents)
            train_in(World(), run, plan, trained[family])
        return trained[family]

    return run_dir


def run_of(family: str, documents: Path) -> RunConfig:
    """A run of three steps at the full learning rate, so that a wrong update shows in the next loss."""
    return RunConfig.model_validate(
        {
            "model": DENSE | FAMILIES[family],
            "data": {"sources": {str(documents): 1.0}, "seq_len": 32},
            "train": {"steps": STEPS, "global_batch": 8},
            # With a smaller eps Adam blows the rounding of gradients that are nearly 0 up to steps of its full size.
            "optimizer": {"lr": 1e-2, "eps": 1e-6},
            "schedule": {"kind": "constant", "warmup_steps": 0},
            "evaluate": {"every_steps": 0, "tokens": 300},
            "checkpoint": {"every_minutes": 0},
        }
    )


def enter(run_dir: Path, run: RunConfig, plan: Plan, documents: Path) -> Path:
    """The folder as the launcher leaves it to the workers."""
    run_folder.write(run_dir, run, plan, [documents])
    return run_dir


@pytest.mark.parametrize(
    ("family", "plan"),
    [*QUICK, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)],
    ids=str,
)
def test_every_mesh_gives_the_numbers_of_one_process(
    workers: WorkerPool,
    documents: Path,
    reference: Callable[[str], Path],
    tmp_path: Path,
    family: str,
    plan: str,
) -> None:
    run, laid_out = run_of(family, documents), eager(plan)
    check_plan(laid_out, run, laid_out.world_size)
    alone, together = reference(family), enter(tmp_path, run, laid_out, documents)
    workers.run(laid_out.world_size, train_in, run, laid_out, together)
    differences = compare(alone, together)
    assert not differences.beyond(TOLERANCE), differences
