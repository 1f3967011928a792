"""Small runs, and plans of any kind for them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from argosy.config.schema import RunConfig
from argosy.plan.pipeline import SCHEDULES
from argosy.plan.plan import MESH_AXES, Plan


def run(sites: Any = (), **sections: dict[str, Any]) -> RunConfig:
    """Four layers of four heads, two of them key/value heads; 8 rows of 64 tokens a step."""
    base = {
        "model": {"layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "head_width": 8, "ffn_width": 64},
        "data": {"seq_len": 64},
        "train": {"steps": 1, "global_batch": 8},
    }
    tables = {name: base.get(name, {}) | sections.get(name, {}) for name in base | sections}
    return RunConfig.model_validate({**tables, "sites": sites})


SMALL = st.sampled_from([1, 1, 2, 3, 4])
"""Sizes of meshes for small runs."""


def plans(size: st.SearchStrategy[int], **others: st.SearchStrategy[Any]) -> st.SearchStrategy[Plan]:
    """Return plans whose axes have any `size`; the keys in `others` vary too, the rest have their defaults."""
    return st.builds(
        Plan,
        **dict.fromkeys((*MESH_AXES, "ep"), size),
        zero=st.integers(0, 3),
        schedule=st.sampled_from(sorted(SCHEDULES)),
        context=st.sampled_from(["ring", "ulysses"]),
        recompute=st.sampled_from(["none", "selective", "full"]),
        precision=st.sampled_from(["fp32", "bf16", "fp16", "fp8", "fp8_rowwise", "fp8_blockwise", "mxfp8"]),
        weights=st.sampled_from(["fp32", "fp32", "bf16"]),
        async_tp=st.sampled_from([False, False, True]),
        overlap_experts=st.sampled_from([False, False, True]),
        user_buffers=st.sampled_from([False, False, True]),
        fp8_gather=st.sampled_from([False, False, True]),
        compile=st.booleans(),
        **others,
    )


ANY_PLAN = plans(
    SMALL,
    microbatch=st.sampled_from([1, 2, 3, 4]),
    sum_inside=st.sampled_from([1, 1, 1, 2, 3]),
    sum_between=st.sampled_from([1, 1, 1, 2]),
    stages_per_rank=st.sampled_from([1, 2, 3]),
)


@st.composite
def any_run(draw: st.DrawFn) -> RunConfig:
    experts = draw(st.sampled_from([0, 6, 8]))
    model = {
        "layers": draw(st.sampled_from([2, 4, 12])),
        "heads": 12,
        "kv_heads": draw(st.sampled_from([1, 2, 6, 12])),
        "ffn_width": draw(st.sampled_from([64, 96])),
        "moe": {"experts": experts},
    }
    data = {"seq_len": draw(st.sampled_from([48, 64, 100]))}
    return run(model=model, data=data, train={"global_batch": draw(st.sampled_from([6, 8, 24, 30]))})
