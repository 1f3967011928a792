"""Attention over packed documents in bf16 on a CPU: forward and backward, and the memory that stays, in one run.

    python benchmarks/packed_attention.py [--seq-len 256] [--steps 300]

padded to n   one call for each document, its length padded to a multiple of n (`models.attention`; 1: as it is)
mask          one call for whole rows, with a mask in which documents do not see each other

Rows are cut at random places, two cuts in a row on average. Each contender has a process of its own, since what oneDNN
makes for a shape stays in it; they take turns of one step.
"""

from __future__ import annotations

import argparse
import re
import time
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.models import attention, attention_kernels
from argosy.parallel.world import keep_freed_memory

ROWS, HEADS, HEAD_WIDTH, CUTS = 4, 6, 64, 2
CONTENDERS = {"as they are": 1, "padded to 16": 16, "padded to 32": 32, "padded to 64": 64, "mask": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    pools = {name: Pool(1, begin, (multiple,)) for name, multiple in CONTENDERS.items()}
    before = {name: pool.apply(resident_bytes) for name, pool in pools.items()}
    seconds: dict[str, list[float]] = {name: [] for name in pools}
    for step in range(options.steps):
        for name, pool in pools.items():
            seconds[name].append(pool.apply(one_step, (step, options.seq_len)))
    half = options.steps // 2
    for name, pool in pools.items():
        first, then = sum(seconds[name][:half]), sum(seconds[name][half:])
        ratio = then / sum(seconds["as they are"][half:])
        grown = pool.apply(resident_bytes) - before[name]
        print(
            f"{name:14} {first / half * 1e3:7.2f} ms a step, then {then / (options.steps - half) * 1e3:7.2f} "
            f"({ratio:.2f} of as they are)   {grown / 1e6:6.0f} MB more"
        )


def begin(multiple: int) -> None:
    """Make this process the one of a contender; 0: the mask."""
    torch.set_num_threads(1)
    keep_freed_memory()
    if multiple:
        attention_kernels.PADDED_TOKENS = multiple
    else:
        attention.packed_attention = masked_attention  # type: ignore[assignment]


def one_step(step: int, seq_len: int) -> float:
    """Seconds of forward and backward of the step's documents."""
    random = np.random.default_rng(step)
    cuts = random.choice(ROWS * seq_len, CUTS * ROWS, replace=False)
    edges = sorted({*range(0, ROWS * seq_len + 1, seq_len), *map(int, cuts)})
    documents = torch.tensor(edges, dtype=torch.int32)
    q, k, v = (torch.randn(ROWS, seq_len, HEADS, HEAD_WIDTH, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    began = time.perf_counter()
    attention.packed_attention(q, k, v, attention.Documents(documents, documents)).sum().backward()
    return time.perf_counter() - began


def masked_attention(q_BTHE: Tensor, k_BTHE: Tensor, v_BTHE: Tensor, documents: Tensor) -> Tensor:
    B, T = q_BTHE.shape[:2]
    places = torch.arange(B * T, dtype=torch.int32)
    of_document = torch.searchsorted(documents, places, right=True).view(B, 1, T)
    seen = (of_document.mT == of_document).tril().unsqueeze(1)
    q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BTHE, v_BTHE))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)


def resident_bytes() -> int:
    """What this process holds that no file does."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    (kilobytes,) = re.findall(r"^Anonymous: +(\d+) kB$", rollup, re.MULTILINE)
    return int(kilobytes) * 1024


if __name__ == "__main__":
    main()
