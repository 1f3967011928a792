"""The software that published runs used, as far as the cost model tells software apart: from the systems' papers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from argosy.plan.cost.rates import System

MEGATRON_2021 = System(
    flash=0, sequence_parallel=0, balanced_stages=0, weight_bytes=2, moment_bytes=12, updated_bytes=2, whole_logits=6,
    dropout=1, overlaps_gradients=0, sums_once=0, kept_widths=0, gathers_again=1, receives_ahead=0, gradient_buffers=1,
)  # fmt: skip
"""Megatron-LM as of Narayanan et al. 2021: fused softmax, no flash attention, gradients summed after backward."""
MEGATRON_2022 = replace(MEGATRON_2021, sequence_parallel=1)
"""With sequence parallelism and selective recompute (Korthikanti et al. 2022)."""
MEGATRON_CORE = System(
    balanced_stages=0, whole_experts=1, weight_bytes=2, moment_bytes=12, reduced_bytes=2, updated_bytes=2,
    whole_logits=6, overlaps_tensor=1, sums_once=0, selective=0.55, gathers_again=1, receives_ahead=0,
    gradient_buffers=1, ring_gradient_bytes=2,
)  # fmt: skip
"""Megatron-Core from 2023: flash attention, tp-comm-overlap, overlapped gradient sums, experts whole (ETP 1)."""
FSDP = System(whole_logits=11, reduced_bytes=4, selective=0.42, keeps_root=0)
"""FSDP2 with torch.compile (torchtitan), which shards embedding and head like layers."""
FSDP_EAGER = replace(FSDP, fused=0, whole_logits=14)
"""Bytes for each logit: itself in bf16, and in fp32 its softmax and the gradients of that and of itself."""
FSDP1 = System(whole_logits=11, reduced_bytes=2, fused=0, sums_once=0, selective=0.55, keeps_root=0)
"""FSDP of torch 1.13 and 2.0 with flash attention (llm-foundry)."""
JAX = System(whole_logits=6, sums_once=0, selective=0.55, even_experts=1, launched=0, keeps_root=0)

Cell = dict[str, str]


def _is_ampere(cell: Cell) -> bool:
    return cell["gpu"].startswith(("A100", "A800"))


def _foundry(cell: Cell) -> System:
    """FlashAttention of 2022, made for the A100."""
    return replace(FSDP1, attention=0.65 if _is_ampere(cell) else 0.35)


def _fms(cell: Cell) -> System:
    """FlashAttention 2, torch.compile."""
    return replace(FSDP1, fused=1, attention=1 if _is_ampere(cell) else 0.5)


def _titan(cell: Cell) -> System:
    """FlashAttention 2; the note says what is compiled, and whether tensor parallelism is asynchronous."""
    notes = cell["notes"].lower()
    made = FSDP if "compile" in notes else FSDP_EAGER
    return replace(made, overlaps_tensor=float("async" in notes), attention=1 if _is_ampere(cell) else 0.5)


def _megatron_2021(cell: Cell) -> System:
    """If these used ZeRO 3, it was fairscale's or DeepSpeed's, which gathered parameter by parameter and freed a layer
    after each forward, also after that of recomputation."""
    if cell["zero_stage"] != "3":
        return MEGATRON_2021
    of_deepspeed = "SC'21" in cell["source"]
    return replace(
        MEGATRON_2021, reduced_bytes=2, gathers=12 if of_deepspeed else 1, gathers_recomputed=float(of_deepspeed)
    )


def _megatron_core(cell: Cell) -> System:
    """DeepEP or HybridEP, and tokens dealt out evenly, or what notes and recipes say. DeepSeek overlaps the exchange
    (DualPipe), and its router balances the experts by itself (DeepSeek-V3, section 2.1.2)."""
    notes = cell["notes"].lower()
    overlaps = "deepseek" in cell["source"].lower() or "1f1b overlap" in notes
    return replace(
        MEGATRON_CORE,
        sends_once=float("a2a" not in notes and not (_is_bridge(cell) and _has_plain_exchange(cell))),
        overlaps_experts=float(overlaps or (_is_bridge(cell) and _overlaps(cell))),
        even_experts=float("real routing" not in notes),
        launched=_launched(cell),
    )


def _launched(cell: Cell) -> float:
    """Share of the kernels that recipes do not capture as CUDA graphs. On Blackwell it is none if tokens are dropped,
    so that shapes are fixed; with Grace hosts it is the experts and their exchange, but not attention and router
    (`cuda_graph_scope`)."""
    if cell["gpu"].startswith("H"):
        return 1
    if "tokendrop" in cell["notes"]:
        return 0
    captures = cell["gpu"].startswith("GB") and not (cell["model"].startswith("gpt-oss") and cell["gpu"] == "GB200")
    return 0.4 if captures else 1


def _is_bridge(cell: Cell) -> bool:
    return "megatron-bridge" in cell["source"].lower()


def _has_plain_exchange(cell: Cell) -> bool:
    """Recipes with `moe_token_dispatcher_type="alltoall"` (Megatron-Bridge, scripts/performance/configs)."""
    model = cell["model"]
    return model.startswith("gpt-oss") or (model.startswith("qwen3-235b") and not cell["gpu"].startswith("GB"))


def _overlaps(cell: Cell) -> bool:
    """Recipes with `moe_a2a_overlap`: those where experts of large models span nodes of eight."""
    large = cell["model"].startswith(("deepseek", "kimi", "qwen3-235b"))
    return large and not cell["gpu"].startswith("GB") and float(cell["ep"] or 1) > 8


def _internevo(cell: Cell) -> System:
    """Gradients in bf16, which the update copies to one flat tensor (not with FSDP) and to fp32; AdamW in single
    operations, whose two results are as large as the weights (`hybrid_zero_optim.py`, `fsdp_optimizer.py`)."""
    flat = 2 * (cell["zero_stage"] != "3")
    return replace(MEGATRON_CORE, whole_logits=8, gradient_bytes=2, update_bytes=flat + 4 + 2 * 4)


def _told(system: System, cell: Cell) -> System:
    """Return what a row itself tells of a framework, and nothing that was read elsewhere: not the version of its
    attention, not what recipes capture in graphs or overlap, not what its code keeps in which format."""

    notes = cell["notes"].lower()
    return replace(
        system,
        sequence_parallel=0 if cell["sp"] == "false" else system.sequence_parallel,
        fused=float(bool(system.fused) or "compile" in notes),
        whole_logits=FSDP.whole_logits if system == FSDP_EAGER and "compile" in notes else system.whole_logits,
        overlaps_tensor=float(bool(system.overlaps_tensor) or "async" in notes),
        sends_once=float(bool(system.whole_experts) and "a2a" not in notes),
        overlaps_experts=float("1f1b overlap" in notes),
        even_experts=float("real routing" not in notes),
    )


FRAMEWORKS: tuple[tuple[tuple[str, ...], System], ...] = (
    (("llm-foundry", "fms-fsdp", "llama ("), FSDP1),
    (("torchtitan",), FSDP_EAGER),
    (("tpu-recipes", "palm"), JAX),
    (("sc'21", "tables.tex", "vtrain", "bigscience", "opt-", "glm", "bloom", "dash"), MEGATRON_2021),
    (("korthikanti",), MEGATRON_2022),
    (("",), MEGATRON_CORE),
)
"""Words in the name of a source -> its framework, as it was in those years; the first that is found counts."""

SYSTEMS: tuple[tuple[tuple[str, ...], Callable[[Cell], System]], ...] = (
    (("llm-foundry",), _foundry),
    (("fms-fsdp",), _fms),
    (("torchtitan",), _titan),
    (("tpu-recipes", "palm"), lambda cell: JAX),
    (("internevo",), _internevo),
    (("sc'21", "tables.tex", "vtrain", "bigscience", "opt-", "glm", "bloom", "dash"), _megatron_2021),
    (("korthikanti",), lambda cell: MEGATRON_2022 if cell["sp"] == "true" else MEGATRON_2021),
    (("llama (",), lambda cell: replace(FSDP1, fused=1)),
    (("",), _megatron_core),
)
"""Words in the name of a source -> its software; the first that is found counts."""


def system_of(cell: Cell, recipes: bool = True) -> System:
    """Return the software of a row; without `recipes`, no more of it than its framework and its notes."""
    source = cell["source"].lower()
    if recipes:
        return next(make(cell) for words, make in SYSTEMS if any(word in source for word in words))
    return next(_told(system, cell) for words, system in FRAMEWORKS if any(word in source for word in words))
