"""A trace of torch's profiler in a few figures: operations, communication by axis, idle gaps.

It reads the trace's events (Chrome's trace format: name, cat, tid, ts and dur in microseconds) and the marks that
`observe.collectives` and `training.services.profiling` left in them. No torch.

On a CPU the process's main thread is looked at: it is idle where it is neither in an operation nor in a collective
(Python, or another process had the core), and a collective is exposed as long as the thread is in its call or its
wait. On a GPU kernels are: it is idle where none runs, and a collective is exposed as long as no other kernel runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from argosy.observe.counters import OTHER
from argosy.plan.cost.estimate import seconds

STEP_MARK, PART_MARK, COLLECTIVE_MARK = "argosy:step/", "argosy:part/", "argosy:collective/"
"""Beginnings of the names of marks: a step, a part of it by the clock's category, a collective."""
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what a GPU does."""
CCL = "ccl"
"""Part of the names of kernels that communicate: NCCL's and RCCL's, oneCCL's, HCCL's."""
MOST_OPERATIONS, MOST_GAPS = 20, 10
LEAST_GAP_US = 50.0
NAME_LENGTH = 120
Span = tuple[float, float]
"""Start and end, in microseconds."""
Event = Mapping[str, Any]


def summary(events: Sequence[Event]) -> dict[str, Any]:
    """Return the figures of a trace, in seconds of a step: the mean over its steps; all empty if no step is marked.

    operations: name, seconds, share of the step and calls, those that took longest; communication: axis -> seconds
    and exposed_seconds; idle_s; gaps: the longest, with seconds, the part that it was in, and what came before it;
    memory_bytes: the most that tensors held, if it was recorded.
    """
    whole = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps = [event for event in whole if event["name"].startswith(STEP_MARK) and event.get("cat") == "user_annotation"]
    if not steps:
        return {"step_s": 0.0, "operations": [], "communication": {}, "idle_s": 0.0, "gaps": []}
    window = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    inside = [event for event in whole if window[0] <= event["ts"] <= window[1]]
    kernels = [event for event in inside if event.get("cat") in ON_GPU]
    main = [event for event in inside if event["tid"] == steps[0]["tid"]]
    parts = [event for event in main if event["name"].startswith(PART_MARK)]
    found = _of_gpu(kernels, inside, window) if kernels else _of_cpu(main, inside, window)
    count = len(steps)
    step_s = sum(event["dur"] for event in steps) / 1e6 / count
    return {
        "step_s": round(step_s, 9),
        "operations": _largest(found["operations"], found["calls"], count, step_s),
        "communication": {
            axis: {"seconds": _mean(total, count), "exposed_seconds": _mean(exposed, count)}
            for axis, (total, exposed) in sorted(found["communication"].items())
        },
        "idle_s": _mean(sum(end - start for start, end, _ in found["gaps"]), count),
        "gaps": _longest(found["gaps"], parts),
        **_memory(events),
    }


def _of_cpu(main: list[Event], inside: list[Event], window: Span) -> dict[str, Any]:
    calls = [event for event in main if _is_call(event)]
    # What gloo's threads do belongs to collectives; other threads (autograd's, the loader's) compute.
    computing = {event["tid"] for event in inside} - {e["tid"] for e in inside if e["name"].startswith("gloo:")}
    computing.add(main[0]["tid"])
    operations: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for tid in computing:
        own = [event for event in inside if event["tid"] == tid and _is_call(event)]
        for event, self_us in _self_times(own):
            if not event["name"].startswith((COLLECTIVE_MARK, "c10d::")):
                operations[event["name"]] += self_us
                counts[event["name"]] += 1
    return {
        "operations": operations, "calls": counts, "communication": _waits(inside),
        "gaps": _gaps([(e["ts"], e["ts"] + e["dur"], e["name"]) for e in calls], window),
    }  # fmt: skip


def _is_call(event: Event) -> bool:
    return event.get("cat") == "cpu_op" or event["name"].startswith(COLLECTIVE_MARK)


def _waits(events: Iterable[Event]) -> dict[str, tuple[float, float]]:
    """Return axis -> time from each call to the end of its wait, and the part of it in which the caller stood still."""
    spans: dict[str, list[Span]] = defaultdict(list)
    for event in events:
        if event["name"].startswith(COLLECTIVE_MARK):
            name = event["name"].removesuffix("/wait")
            spans[name].append((event["ts"], event["ts"] + event["dur"]))
    found: dict[str, tuple[float, float]] = {}
    for name, parts in spans.items():
        axis = _axis(name)
        total, exposed = found.get(axis, (0.0, 0.0))
        total += max(end for _, end in parts) - min(start for start, _ in parts)
        found[axis] = total, exposed + sum(end - start for start, end in parts)
    return found


def _of_gpu(kernels: list[Event], inside: list[Event], window: Span) -> dict[str, Any]:
    communicating = [event for event in kernels if CCL in event["name"].lower()]
    others = [event for event in kernels if CCL not in event["name"].lower()]
    operations: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for event in others:
        operations[event["name"][:NAME_LENGTH]] += event["dur"]
        counts[event["name"][:NAME_LENGTH]] += 1
    busy = _union((e["ts"], e["ts"] + e["dur"]) for e in others)
    marks = [e for e in inside if e.get("cat") == "gpu_user_annotation" and e["name"].startswith(COLLECTIVE_MARK)]
    communication: dict[str, tuple[float, float]] = {}
    for event in communicating:
        span = event["ts"], event["ts"] + event["dur"]
        over = [
            m for m in marks if m["tid"] == event["tid"] and m["ts"] <= span[0] and span[1] <= m["ts"] + m["dur"] + 1
        ]
        axis = _axis(over[-1]["name"]) if over else OTHER
        total, exposed = communication.get(axis, (0.0, 0.0))
        communication[axis] = total + event["dur"], exposed + event["dur"] - _overlap(busy, span)
    spans = [(e["ts"], e["ts"] + e["dur"], e["name"][:NAME_LENGTH]) for e in kernels]
    return {
        "operations": operations, "calls": counts, "communication": communication, "gaps": _gaps(spans, window)
    }  # fmt: skip


def _self_times(events: list[Event]) -> Iterable[tuple[Event, float]]:
    """Yield each event of one thread, and its time without those within it."""
    stack: list[list[Any]] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while stack and stack[-1][0]["ts"] + stack[-1][0]["dur"] <= event["ts"]:
            done, within = stack.pop()
            yield done, max(0.0, done["dur"] - within)
        if stack:
            stack[-1][1] += event["dur"]
        stack.append([event, 0.0])
    for done, within in stack:
        yield done, max(0.0, done["dur"] - within)


def _gaps(spans: list[tuple[float, float, str]], window: Span) -> list[tuple[float, float, str]]:
    """Return the times of `window` in no span, each with the name of the span that ended before it."""
    gaps, at, before = [], window[0], ""
    for start, end, name in sorted(spans):
        if start > at:
            gaps.append((at, start, before))
        if end > at:
            at, before = end, name
    if window[1] > at:
        gaps.append((at, window[1], before))
    return gaps


def _union(spans: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _overlap(union: list[Span], span: Span) -> float:
    at = max(0, bisect_right(union, (span[0], float("inf"))) - 1)
    total = 0.0
    while at < len(union) and union[at][0] < span[1]:
        total += max(0.0, min(union[at][1], span[1]) - max(union[at][0], span[0]))
        at += 1
    return total


def _largest(operations: Mapping[str, float], calls: Counter[str], count: int, step_s: float) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "seconds": _mean(us, count),
            "share": round(us / 1e6 / count / step_s, 4) if step_s else 0.0,
            "calls": round(calls[name] / count, 2),
        }
        for name, us in sorted(operations.items(), key=lambda pair: -pair[1])[:MOST_OPERATIONS]
    ]


def _longest(gaps: list[tuple[float, float, str]], parts: list[Event]) -> list[dict[str, Any]]:
    known = [gap for gap in gaps if gap[1] - gap[0] >= LEAST_GAP_US]
    return [
        {"seconds": round((end - start) / 1e6, 9), "part": _part(parts, start, end), "after": _plain(before)}
        for start, end, before in sorted(known, key=lambda gap: gap[0] - gap[1])[:MOST_GAPS]
    ]


def _part(parts: list[Event], start: float, end: float) -> str:
    middle = (start + end) / 2
    over = [event["name"] for event in parts if event["ts"] <= middle <= event["ts"] + event["dur"]]
    return over[-1].removeprefix(PART_MARK) if over else OTHER


def _plain(name: str) -> str:
    return name.removeprefix(COLLECTIVE_MARK).partition("#")[0]


def _axis(name: str) -> str:
    return str(name.removeprefix(COLLECTIVE_MARK).partition("/")[0])


def _mean(us: float, count: int) -> float:
    return round(us / 1e6 / count, 9)


def _memory(events: Sequence[Event]) -> dict[str, int]:
    held = [event["args"].get("Total Allocated", 0) for event in events if event.get("name") == "[memory]"]
    return {"memory_bytes": int(max(held))} if held else {}


SHOWN_OPERATIONS = 5
SHOWN_NAME = 40


def profile_in_words(steps: list[int], ranks: Mapping[int, Mapping[str, Any]], folder: Path) -> str:
    """Return what was recorded, of the first rank in full: it stands for the others unless one differs much."""
    which = f"step {steps[0]}" if steps[0] == steps[1] else f"steps {steps[0]} to {steps[1]}"
    lines = [f" profile of {which}, {_ranks(ranks)}: {folder}"]
    lines += [f"  rank {rank}: {found['problem']}" for rank, found in ranks.items() if "problem" in found]
    whole = {rank: found for rank, found in ranks.items() if "problem" not in found}
    if whole:
        rank = min(whole)
        lines += [
            f"  a step of rank {rank} takes {seconds(whole[rank]['step_s'])} while it is recorded",
            *_of(whole[rank]),
        ]
    return "\n".join(lines)


def _of(found: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, figures in found["parts"].items():
        planned = f"   planned {seconds(figures['predicted'])}" if "predicted" in figures else ""
        lines.append(f"  {name.replace('_', ' + '):20} {seconds(figures['measured']):>9}{planned}")
    for axis, figures in found["communication"].items():
        planned = (
            f"   planned {seconds(figures['predicted_exposed_seconds'])}"
            if "predicted_exposed_seconds" in figures
            else ""
        )
        exposed = f"{seconds(figures['exposed_seconds']):>9}{planned}   of {seconds(figures['seconds'])} in collectives"
        lines.append(f"  {'waits along ' + axis:20} {exposed}")
    lines.append(f"  {'idle':20} {seconds(found['idle_s']):>9}{_gap(found['gaps'])}")
    lines.append("  longest operations:")
    lines += [
        f"    {operation['share']:>4.0%}  {seconds(operation['seconds']):>9}  {operation['name'][:SHOWN_NAME]}"
        for operation in found["operations"][:SHOWN_OPERATIONS]
    ]
    return lines


def _gap(gaps: list[Mapping[str, Any]]) -> str:
    if not gaps:
        return ""
    after = f" after {gaps[0]['after']}" if gaps[0]["after"] else ""
    return f"   the longest gap: {seconds(gaps[0]['seconds'])} in {gaps[0]['part']}{after}"


def _ranks(ranks: Mapping[int, Any]) -> str:
    known = sorted(ranks)
    shown = ", ".join(map(str, known[:8])) + (", ..." if len(known) > 8 else "")
    return f"rank{'s' if len(known) > 1 else ''} {shown}" if known else "no rank"
