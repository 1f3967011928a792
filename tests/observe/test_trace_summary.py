"""What a trace says, in figures."""

from __future__ import annotations

from typing import Any

import pytest

from argosy.observe.trace_summary import summary


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "tid": tid, "ts": ts, "dur": dur, "args": args}


def mark(name: str, ts: float, dur: float, **kw: Any) -> dict[str, Any]:
    return event(f"argosy:{name}", ts, dur, **{"cat": "user_annotation", **kw})


def test_a_trace_without_steps_says_nothing():
    assert summary([event("aten::mm", 0, 5)])["operations"] == []


def test_on_a_cpu_the_main_thread_tells():
    found = summary([
        mark("step/7", 0, 1000), mark("step/8", 1000, 1000),
        mark("part/forward", 0, 400), mark("part/communication", 400, 500),
        event("aten::linear", 0, 300), event("aten::mm", 50, 200),
        mark("collective/tp/allreduce#0", 400, 100), event("c10d::allreduce_", 410, 80),
        event("aten::mm", 500, 100), mark("collective/tp/allreduce#0/wait", 600, 200),
        mark("collective/replicate/_allgather_base#1", 900, 50),
        event("gloo:all_reduce", 410, 380, cat="user_annotation", tid=2), event("aten::copy_", 420, 60, tid=2),
        event("aten::mm", 1500, 500), event("aten::mm", 2001, 500),
        event("autograd", 1500, 100, tid=3),
    ])  # fmt: skip
    assert found["step_s"] == pytest.approx(1e-3)
    operations = {each["name"]: each for each in found["operations"]}
    assert operations["aten::mm"]["seconds"] == pytest.approx((200 + 100 + 500) / 2 / 1e6)
    assert operations["aten::mm"]["calls"] == 1.5 and operations["aten::mm"]["share"] == 0.4
    assert operations["aten::linear"]["seconds"] == pytest.approx(100 / 2 / 1e6)  # without what is in it
    assert "autograd" in operations and not {"aten::copy_", "c10d::allreduce_"} & set(operations)
    assert found["communication"]["tp"] == {
        "seconds": pytest.approx(400 / 2 / 1e6), "exposed_seconds": pytest.approx(300 / 2 / 1e6)
    }  # fmt: skip
    assert found["communication"]["replicate"]["seconds"] == pytest.approx(50 / 2 / 1e6)
    idle = [(300, 400), (800, 900), (950, 1500)]
    assert found["idle_s"] == pytest.approx(sum(end - start for start, end in idle) / 2 / 1e6)
    assert found["gaps"][0] == {"seconds": 0.00055, "part": "other", "after": "replicate/_allgather_base"}
    assert found["gaps"][1]["part"] in ("forward", "communication")


def test_on_a_gpu_kernels_tell():
    gpu = {"cat": "kernel", "tid": 7}
    found = summary([
        mark("step/0", 0, 1000), event("aten::mm", 0, 900),
        event("sgemm", 100, 300, **gpu), event("sgemm", 500, 100, **gpu),
        event("ncclDevKernel_AllReduce", 350, 250, cat="kernel", tid=8),
        event("ncclDevKernel_SendRecv", 700, 100, cat="kernel", tid=8),
        event("Memcpy DtoH", 900, 50, cat="gpu_memcpy", tid=7),
        mark("collective/shard/reduce_scatter_single#3", 345, 256, cat="gpu_user_annotation", tid=8),
    ])  # fmt: skip
    assert found["operations"][0] == {"name": "sgemm", "seconds": 0.0004, "share": 0.4, "calls": 2.0}
    assert found["communication"] == {
        "other": {"seconds": 0.0001, "exposed_seconds": 0.0001},
        "shard": {"seconds": 0.00025, "exposed_seconds": pytest.approx(0.0001)},  # 400 to 500: nothing else runs
    }
    assert found["idle_s"] == pytest.approx((100 + 100 + 100 + 50) / 1e6)


def test_the_most_memory_that_was_held_is_told():
    held = {"ph": "i", "name": "[memory]", "args": {"Total Allocated": 500}}
    assert summary([mark("step/0", 0, 10), held, {**held, "args": {"Total Allocated": 700}}])["memory_bytes"] == 700
