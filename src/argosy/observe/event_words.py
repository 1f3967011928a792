"""Events in a few words, for whoever watches a run: those that matter to a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

GOOD, NOTE, BAD = "green", "yellow", "red"
Event = Mapping[str, Any]

WORDS: dict[str, tuple[str, Callable[[Event], str]]] = {
    "start": ("", lambda e: f"training goes on at step {e['step']}" if e["step"] else "training begins"),
    "recovered": (GOOD, lambda e: f"recovered at step {e['step']} ({e['source']}), {e['steps_lost']} steps lost"),
    "resume": (GOOD, lambda e: f"goes on from the checkpoint of step {e['step']}"),
    "save": (GOOD, lambda e: f"saved step {e['step']}"),
    "save_failed": (BAD, lambda e: f"saving failed: {e['error']}"),
    "writer_died": (NOTE, lambda e: f"the process that writes checkpoints died: {e['why']}"),
    "drain_failed": (NOTE, lambda e: f"copying a checkpoint away failed: {e['error']}"),
    "damaged_checkpoint": (BAD, lambda e: f"a checkpoint is damaged: {e['problem']}"),
    "worker_died": (BAD, lambda e: f"worker {_of(e, 'rank')} died: {e['why']}"),
    "killed": (NOTE, lambda e: f"worker {_of(e, 'rank')} was killed: {e['why']}"),
    "generation": ("", lambda e: f"{e['size']} processes form world {e['generation']}"),
    "replan": (NOTE, lambda e: f"another plan: {e['plan']}"),
    "rebalanced": (NOTE, lambda e: f"shares of microbatches {e['shares'] or 'even'} from step {e['step']} on"),
    "migrated": (NOTE, lambda e: f"migrated ({e['because']}): {e['why']}"),
    "node_refused": (BAD, lambda e: f"node {e['node']} is refused: {e['why']}"),
    "agent_left": (NOTE, lambda e: f"node {e['node']} left: {e['why']}"),
    "coordinator_lost": (NOTE, lambda e: f"the coordinator was lost: {e['why']}"),
    "bad_step": (NOTE, lambda e: f"step {e['step']} was bad ({e['reason']}): {e['outcome']}"),
    "transient": (NOTE, lambda e: f"step {e['step']} looked bad, and was fine when it was repeated"),
    "rewind": (NOTE, lambda e: f"went back to step {e['step']}"),
    "corruption": (BAD, lambda e: f"replicas differ at step {e['step']}: {e['outcome']}"),
    "gradient_corrupt": (BAD, lambda e: f"rank {e['rank']} computed a wrong gradient at step {e['step']}"),
    "collective_corrupt": (BAD, lambda e: f"a sum of gradients was wrong at step {e['step']}"),
    "bad_shard": (NOTE, lambda e: f"damaged data at step {e['step']}: {e['outcome']}"),
    "fault": (NOTE, lambda e: f"a fault was injected: {e['fault']}"),
    "length": ("", lambda e: f"{e['steps']} steps fit in the time"),
    "signal": (NOTE, lambda e: f"asked to stop by signal {e['number']}"),
    "profile": ("", lambda e: f"profiled steps {e['steps'][0]} to {e['steps'][1]}"),
    "alert": (BAD, lambda e: f"{e['alert']}: {e['why']}"),
}
"""Kind of event -> style (as rich names it), and its words. A kind that is not here is shown if it is a finding."""


def in_words(event: Event) -> tuple[str, str] | None:
    """Return words and style of an event; None for one that is of no interest here, or says less than it should."""
    kind = event.get("event", "")
    try:
        if kind in WORDS:
            style, words = WORDS[kind]
            return words(event), style
        if "action" in event and "why" in event:  # a finding
            return str(event["why"]), NOTE
    except (KeyError, IndexError, TypeError):  # another version wrote it
        pass
    return None


def _of(event: Event, key: str) -> str:
    value = event.get(key)
    return "" if value is None else str(value)
