"""One rule of which devices multiply in eight bits, for the planner, which has the catalogue, and for the start, which
asks the driver.
"""

from __future__ import annotations

FP8_CORES = (8, 9)
"""CUDA compute capability of the first devices with fp8 (Ada; Hopper is 9.0)."""
FP8_BY_GROUP = (9, 0)
"""That of the only devices with `F.scaled_grouped_mm` in fp8 by rows: torch 2.13 skips its tests on others."""
MXFP8_CORES = 10
"""The major number of that of devices whose matmuls take a scale for each 32 numbers in fp8 (B200, B300)."""


def why_not_in_fp8(
    precision: str, capability: tuple[int, int], is_amd_with_fp8: bool, has_experts: bool, who: str, others: str
) -> str | None:
    """Explain why a device cannot multiply as a plan's `precision` (one of `FP8`) says; return None if it can.

    capability: of CUDA; (0, 0) of other devices. who: the device in words. others: precisions that it has.
    """
    has_fp8 = is_amd_with_fp8 or capability >= FP8_CORES
    where = f"{who} (compute capability {capability[0]}.{capability[1]})" if any(capability) else who
    if precision == "mxfp8" and capability[0] != MXFP8_CORES:
        needs, others = "a GPU of compute capability 10 (B200, B300)", "fp8_rowwise" if has_fp8 else others
    elif not has_fp8:
        needs = "a GPU of compute capability 8.9 or more (Ada, Hopper, Blackwell), or AMD's from CDNA 3 on"
    elif has_experts and capability != FP8_BY_GROUP:
        precision = f"{precision} with experts"
        needs = "a GPU of compute capability 9.0 (Hopper), the only one for which torch multiplies them in fp8"
    else:
        return None
    return f"plan.precision = {precision} needs {needs}; this one is {where}. Try precision={others}."
