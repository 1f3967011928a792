"""The software that published runs used, as far as the cost model tells software apart: from the systems' papers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from argosy.plan.rates import System

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
    gradient_buffers=1,
)  # fmt: skip
"""Megatron-Core from 2023: flash attention, tp-comm-overlap, overlapped gradient sums, experts whole (ETP 1)."""
FSDP = System(whole_logits=11, reduced_bytes=4, selective=0.42)
"""FSDP2 with torch.compile (torchtitan)."""
FSDP_EAGER = replace(FSDP, fused=0)
FSDP1 = System(whole_logits=11, reduced_bytes=2, fused=0, sums_once=0, selective=0.55)
"""FSDP of torch 1.13 and 2.0 with flash attention (llm-foundry)."""
JAX = System(whole_logits=6, sums_once=0, selective=0.55)

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
    """Where these used ZeRO 3, it was DeepSpeed's, which gathered parameter by parameter, or fairscale's."""
    if cell["zero_stage"] == "3":
        return replace(MEGATRON_2021, reduced_bytes=2, gathers=12 if "SC'21" in cell["source"] else 1)
    return MEGATRON_2021


def _megatron_core(cell: Cell) -> System:
    """DeepEP and HybridEP are what NVIDIA and DeepSeek publish with; DeepSeek overlaps them (DualPipe)."""
    notes = cell["notes"].lower()
    overlaps = "1f1b overlap" in notes or "deepseek" in cell["source"].lower()
    return replace(MEGATRON_CORE, sends_once=float("a2a" not in notes), overlaps_experts=float(overlaps))


SYSTEMS: tuple[tuple[tuple[str, ...], Callable[[Cell], System]], ...] = (
    (("llm-foundry",), _foundry),
    (("fms-fsdp",), _fms),
    (("torchtitan",), _titan),
    (("tpu-recipes", "palm"), lambda cell: JAX),
    (("internevo",), lambda cell: replace(MEGATRON_CORE, whole_logits=8)),
    (("sc'21", "tables.tex", "vtrain", "bigscience", "opt-", "glm", "bloom", "dash"), _megatron_2021),
    (("korthikanti",), lambda cell: MEGATRON_2022 if cell["sp"] == "true" else MEGATRON_2021),
    (("llama (",), lambda cell: replace(FSDP1, fused=1)),
    (("",), _megatron_core),
)
"""Words in the name of a source -> its software; the first that is found counts."""


def system_of(cell: Cell) -> System:
    """The software of a row."""
    source = cell["source"].lower()
    return next(make(cell) for words, make in SYSTEMS if any(word in source for word in words))
