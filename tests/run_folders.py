"""Run folders as a run leaves them, of any length and size, with what goes wrong in runs planted in them.

The numbers are made up and the same each time. Where a test needs what only a real run can give, `tiny` makes one.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_S = 1_795_000_000.0
"""When these runs start, in seconds since 1970."""
PLAN = """\
pp = 1
dp_replicate = {ranks}
dp_shard = 1
cp = 1
tp = 1
ep = 1
zero = 3
schedule = "1f1b"
stages_per_rank = 2
context = "ring"
recompute = "none"
recompute_every = 1
offload = "none"
microbatch = 4
precision = "bf16"
weights = "fp32"
reduce = "fp32"
compile = false

[prediction]
cluster = "2 x h100-80gb, by the catalogue"
step_s = [0.3, 0.38, 0.5]  # 90 %
memory_bytes = [900000000.0, 1000000000.0, 1100000000.0]  # 90 %

[prediction.seconds]
ideal = 0.1
matmul = 0.1
pointwise = 0.1
gradients = 0.04
optimizer = 0.02
other = 0.02

[prediction.memory]
weights = 100000000.0
gradients = 100000000.0
optimizer = 200000000.0
activations = 400000000.0
workspace = 200000000.0

[prediction.traffic]
replicate = 59120000
"""
RUN = """\
name = "{name}"
[model]
preset = "llama-5m"
[data]
seq_len = 128
[train]
steps = {total_steps}
global_batch = 32
"""


@dataclass(frozen=True)
class Trouble:
    """What goes wrong, and in which step. None: it does not."""

    straggler: tuple[int, int] | None = None
    """Rank, and the first step in which its own work takes twice as long."""
    spike: int | None = None
    """The loss is four times as high in this step."""
    nan: int | None = None
    """Loss and gradient norm are null in this step."""
    killed: tuple[int, int] | None = None
    """Rank, and the step in which it is killed; two steps are lost and run again."""
    stall: tuple[int, float] | None = None
    """Step, and so many seconds of standstill before it."""
    slow_link: tuple[int, int] | None = None
    """Step, and the rank at the link, from which on waiting for others takes five times as long."""
    crash: bool = False
    """The run fails after its last step."""


@dataclass(frozen=True)
class Made:
    """A run folder to be made; `write` makes it."""

    steps: int = 200
    """Steps that were made."""
    total_steps: int | None = None
    """Steps that the run is to make; default: those that were made, so that it is finished."""
    ranks: int = 4
    per_node: int = 2
    step_s: float = 0.4
    start_s: float = START_S
    evaluate_every: int = 50
    norms_every: int = 50
    save_every: int = 100
    layers: int = 4
    experts: int = 0
    """Experts of each layer, whose loads stand in every line."""
    user: Sequence[str] = ()
    """Names of the user's own numbers, in every tenth step."""
    trouble: Trouble = field(default_factory=Trouble)
    is_finished: bool = True
    """False: the run goes on, or was cut off without a word."""

    def write(self, folder: Path) -> Path:
        """Make the folder, and return it."""
        folder.mkdir(parents=True, exist_ok=True)
        total = self.steps if self.total_steps is None else self.total_steps
        (folder / "run.toml").write_text(RUN.format(name=folder.name, total_steps=max(1, total)))
        (folder / "plan.toml").write_text(PLAN.format(ranks=self.ranks))
        _write_lines(folder / "metrics.jsonl", self.metric_lines())
        for process, events in self.events().items():
            _write_lines(folder / "events" / f"{process}.jsonl", events)
        for node in range(self.nodes):
            _write_lines(folder / "nodes" / f"node-{node}.jsonl", self.node_lines(node))
        _write_lines(folder / "samples.jsonl", self.samples())
        if self.is_finished and not self.trouble.crash:
            (folder / "report.json").write_text(json.dumps(self.report(folder), indent=1) + "\n")
        return folder

    @property
    def nodes(self) -> int:
        """The number of machines."""
        return math.ceil(self.ranks / self.per_node)

    def time_s(self, step: int) -> float:
        """When `step` ended."""
        stall = self.trouble.stall
        killed = self.trouble.killed
        late = (stall[1] if stall and step >= stall[0] else 0.0) + (20.0 if killed and step >= killed[1] else 0.0)
        straggler, link = self.trouble.straggler, self.trouble.slow_link
        waits = [(straggler[1] if straggler else step + 1, 0.5), (link[0] if link else step + 1, 0.4)]
        late += sum(share * self.step_s * max(0, step + 1 - first) for first, share in waits)
        return round(self.start_s + 10.0 + late + (step + 1) * self.step_s, 3)

    def metric_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of metrics.jsonl."""
        numbers = random.Random(1)
        for step in range(self.steps):
            yield self.metric_line(step, numbers)
            if self.evaluate_every and step % self.evaluate_every == self.evaluate_every - 1:
                loss = round(_loss(step) + 0.05, 4)
                yield {"step": step, "validation_loss": loss, "bits_per_byte": round(loss / 3, 4)}

    def metric_line(self, step: int, numbers: random.Random | None = None) -> dict[str, Any]:
        """Return the line of a step."""
        numbers = numbers or random.Random(step)
        noise, trouble = numbers.random(), self.trouble
        slow = trouble.straggler is not None and step >= trouble.straggler[1]
        far = trouble.slow_link is not None and step >= trouble.slow_link[0]
        waiting = self.step_s * (0.1 + 0.5 * slow + 0.4 * far)
        step_s = self.step_s * (0.9 + 0.02 * noise) + waiting
        line: dict[str, Any] = {
            "step": step,
            "tokens": 4096 * (step + 1),
            "loss": round(_loss(step) + 0.05 * noise, 6) * (4 if step == trouble.spike else 1),
            "grad_norm": round(1 + noise, 6) * (30 if step == trouble.spike else 1),
            "lr": round(1e-3 * min(1, (step + 1) / 20) * (1 - 0.9 * step / max(1, self.steps)), 9),
            "first_sample": 32 * step,
            "samples": 32,
            "time_s": self.time_s(step),
            "step_time_s": round(step_s, 6),
            "tokens_per_s": round(4096 / step_s, 1),
            "mfu": round(0.4 * self.step_s / step_s, 4),
            "memory_bytes": 900_000_000 + step % 7,
            "seconds": self._seconds(step_s, waiting),
            "communication": {
                "dp_replicate": {
                    "node": [round(waiting / 3, 6), 20_000_000],
                    "network": [round(waiting / 2, 6), 39_120_000],
                },
                "world": {"network": [0.001, 96]},
            },
            "memory": {
                "weights": 10**8,
                "gradients": 10**8,
                "optimizer": 2 * 10**8,
                "before": 10**8,
                "other": 4 * 10**8 + step % 7,
            },
        }
        if step == trouble.nan:
            line |= {"loss": None, "grad_norm": None}
        if self.norms_every and step % self.norms_every == 0:
            line["norms"] = {f"layers.{n}": self._norms(step, n) for n in range(self.layers)}
        if self.experts:
            loads = {"tokens": [numbers.randrange(100) for _ in range(self.experts)], "imbalance": 1 + noise}
            line["experts"] = {str(n): loads | {"entropy": 0.9, "dropped": 0.0} for n in range(self.layers)}
        if self.user and step % 10 == 0:
            line["user"] = dict.fromkeys(self.user, step + noise)
        return line

    def _seconds(self, step_s: float, waiting: float) -> dict[str, float]:
        work = step_s - waiting
        shares = {"data": 0.02, "forward": 0.3, "backward": 0.58, "optimizer": 0.07, "other": 0.03}
        parts = {part: round(share * work, 6) for part, share in shares.items()}
        parts |= {"communication": round(waiting, 6), "step": round(step_s, 6)}
        return parts | {"checkpoint": 0.0, "evaluate": 0.0}

    def _norms(self, step: int, layer: int) -> dict[str, float]:
        return {"weight": 10.0 + layer, "gradient": 1 / (layer + 1 + step / 100), "update": 0.001 * (layer + 1)}

    def events(self) -> dict[str, list[dict[str, Any]]]:
        """Return the events of each process."""
        plan = f"dp_replicate={self.ranks},microbatch=4,precision=bf16,compile=false"
        hardware = {"device": "NVIDIA H100 80GB HBM3", "processes": self.ranks, "per_node": self.per_node}
        at = self.start_s
        agents = {f"launcher-node-{n}": [_event(at, "worker_started", slot=0, pid=100 + n)] for n in range(self.nodes)}
        slots = {f"node-{rank // self.per_node}/{rank % self.per_node}": rank for rank in range(self.ranks)}
        coordinator = [_event(at + 1, "agent_came", node=f"node-{n}") for n in range(self.nodes)]
        coordinator.append(_event(at + 2, "generation", generation=1, size=self.ranks, plan=plan, ranks=slots))
        start = {"plan": plan, "world_size": self.ranks, "peak_flops": 9.28e11, "torch": "2.13.0+cpu"}
        start["hardware"] = hardware | {"peak_flops_per_s": {"bf16": 4.6e11}}
        ranks = {f"rank-{rank}": [_event(at + 10, "start", step=0, **start)] for rank in range(self.ranks)}
        for step in range(self.save_every, self.steps + 1, self.save_every or 1):
            for events in ranks.values():
                events.append(_event(self.time_s(step - 1), "save", step=step, seconds=0.5, bytes=10**8))
        if killed := self.trouble.killed:
            rank, step = killed
            died_s = self.time_s(step - 1) + 0.1
            node = f"node-{rank // self.per_node}"
            dead = {"rank": rank, "step": step, "generation": 1, "exit_code": -9, "why": "signal SIGKILL", "pid": 7}
            agents[f"launcher-{node}"].append(_event(died_s, "worker_died", **dead))
            agents[f"launcher-{node}"].append(_event(died_s + 0.1, "worker_started", slot=0, pid=200))
            why = f"rank {rank} is lost: signal SIGKILL"
            coordinator.append(_event(died_s + 0.05, "break", generation=1, why=why))
            new = {"generation": 2, "size": self.ranks, "plan": plan, "ranks": slots}
            coordinator.append(_event(died_s + 0.2, "generation", **new))
            back = {"source": "memory", "step": max(0, step - 2), "steps_lost": 2, "seconds": 0.5, "refused": []}
            ranks["rank-0"].append(_event(died_s + 10, "recovered", **back))
            for events in ranks.values():
                events.append(_event(died_s + 10.5, "start", step=max(0, step - 2), **start))
        if straggler := self.trouble.straggler:
            rank, step = straggler
            evidence = {"own_s": 2 * self.step_s, "peers_s": self.step_s}
            told = {"ranks": [rank], "action": "alarm", "why": f"rank {rank} takes 2.0 times as long as its peers"}
            coordinator.append(_event(self.time_s(step + 20), "straggler", evidence=evidence, **told))
        if self.is_finished:
            end_s = self.time_s(self.steps - 1) + 1
            for events in ranks.values():
                events.append(_event(end_s, "end", step=self.steps, finished=not self.trouble.crash))
            code, why = (1, "rank 0 ended with code 1: it raised ValueError") if self.trouble.crash else (0, "done")
            coordinator.append(_event(end_s + 0.1, "finish", exit_code=code, why=why))
        for events in (coordinator, *agents.values(), *ranks.values()):
            events.sort(key=lambda event: event["time_s"])
        return {"coordinator": coordinator, **agents, **ranks}

    def node_lines(self, node: int, every_s: float = 5.0) -> Iterator[dict[str, Any]]:
        """Yield the lines of an agent."""
        ranks = list(range(node * self.per_node, min(self.ranks, (node + 1) * self.per_node)))
        window = max(1, round(every_s / self.step_s))
        for first in range(0, self.steps, window):
            last = min(first + window, self.steps) - 1
            yield self._node_line(node, ranks, first, last)

    def _node_line(self, node: int, ranks: list[int], first: int, last: int) -> dict[str, Any]:
        numbers = random.Random(first)
        own = [(step, [self._own_s(rank, step, numbers) for rank in ranks]) for step in range(first, last + 1)]
        means = [round(sum(row[1][n] for row in own) / len(own), 6) for n in range(len(ranks))]
        step_s = self.metric_line(last)["step_time_s"]
        waits = [round(step_s - mean, 6) for mean in means]
        far = self.trouble.slow_link is not None and last >= self.trouble.slow_link[0]
        return {
            "time_s": self.time_s(last),
            "generation": 2 if self.trouble.killed and first >= self.trouble.killed[1] else 1,
            "ranks": ranks,
            "steps": [first, last],
            "step_s": [step_s] * len(ranks),
            "seconds": {
                "forward": [round(0.35 * mean, 6) for mean in means],
                "backward": [round(0.65 * mean, 6) for mean in means],
                "communication": waits,
            },
            "own": own,
            "communication": {
                "dp_replicate": {
                    "node": {"seconds": [round(w / 3, 6) for w in waits], "bytes": [20_000_000] * len(ranks)},
                    "network": {
                        "seconds": [
                            round(w / 2 * (5 if far and self.trouble.slow_link[1] == r else 1), 6)  # type: ignore[index]
                            for w, r in zip(waits, ranks, strict=True)
                        ],
                        "bytes": [39_120_000] * len(ranks),
                    },
                }
            },
            "memory_bytes": [900_000_000 + rank for rank in ranks],
            "devices": [
                {"ranks": [rank], "name": "NVIDIA H100 80GB HBM3", "utilisation": 0.9, "memory_bytes": 10**9,
                 "temperature_c": 60 + rank, "power_w": 500.0, "clock_mhz": 1980}
                for rank in ranks
            ],
            "host": {"cpu": 0.3, "memory_used_bytes": 10**10, "memory_bytes": 10**11, "disk_free_bytes": 10**12 - last,
                     "network_sent_bytes_per_s": 1e8, "network_received_bytes_per_s": 1e8, "load": 3.0},
            "energy": {"joules": round(500.0 * len(ranks) * self.step_s * (last - first + 1), 1), "source": "nvml"},
            "checkpoint_bytes": 0,
        }  # fmt: skip

    def _own_s(self, rank: int, step: int, numbers: random.Random) -> float:
        straggler = self.trouble.straggler
        slow = straggler is not None and straggler[0] == rank and step >= straggler[1]
        return round(self.step_s * (0.85 + 0.05 * numbers.random()) * (2 if slow else 1), 6)

    def samples(self) -> list[dict[str, Any]]:
        """Return the lines of samples.jsonl."""
        every = max(1, self.evaluate_every)
        return [
            {"step": step, "time_s": self.time_s(step), "prompt": "def", "text": f"def f{step}():\n    return 1"}
            for step in range(every - 1, self.steps, every)
        ]

    def report(self, folder: Path) -> dict[str, Any]:
        """Return report.json."""
        last = self.metric_line(max(0, self.steps - 1))
        return {
            "name": folder.name,
            "run_dir": str(folder),
            "status": "finished",
            "plan": f"dp_replicate={self.ranks},microbatch=4,precision=bf16,compile=false",
            "steps": self.steps,
            "tokens": last["tokens"],
            "loss": last["loss"],
            **{key: last[key] for key in ("step_time_s", "tokens_per_s", "mfu", "memory_bytes")},
            "peak_flops": 9.28e11,
            "time_to_first_step_s": 10.0,
            "seconds": {key: round(value * self.steps, 4) for key, value in last["seconds"].items()},
            "wall_s": round(self.time_s(self.steps - 1) - self.start_s, 3),
            "goodput": 0.9,
            "validation": {"loss": 2.1, "perplexity": 8.2, "bits_per_byte": 0.7, "unigram_bits_per_byte": 4.0},
            "sample": "def f():",
            "device": "NVIDIA H100 80GB HBM3",
            "software": "torch 2.13.0",
            "energy": {"kwh": 0.02, "co2_kg": 0.008, "source": "nvml", "money": 1.5, "currency": "USD"},
        }


def append(path: Path, *lines: Mapping[str, Any] | bytes) -> None:
    """Append lines as a run does; bytes as they are: half a line, or what is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        for line in lines:
            file.write(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")


def _loss(step: int) -> float:
    return 2.0 + 6.0 / (1 + step / 50)


def _event(time_s: float, event: str, **facts: Any) -> dict[str, Any]:
    return {"time_s": round(time_s, 3), "event": event, **facts}


def _write_lines(path: Path, lines: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
