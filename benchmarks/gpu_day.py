"""The first hour on a machine with a GPU: what could not be known without one, in the order of what tells most.

    make gpu                                           # all of it, into gpu-DATE/
    python benchmarks/gpu_day.py --only parity peers   # some stages
    python benchmarks/gpu_day.py --first probe         # from this stage on
    python benchmarks/gpu_day.py --rehearse            # every stage on this machine's CPU, with a tiny model

It stops at the first stage that fails: what comes after it would tell less. Each stage's output is a file in one
folder, beside `versions.txt` and `summary.json` (state and seconds of each stage).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import tyro

HERE = Path(__file__).resolve().parent
TREE = HERE.parent
PYTHON = sys.executable
ONE_B = {"layers": 16, "width": 2048, "ffn-width": 8192, "vocab-size": 32768, "seq-len": 4096, "batch": 2}
"""1.2e9 parameters; so many rows that two contenders fit into 80 GB side by side."""
SMALL = {"layers": 2, "width": 64, "ffn-width": 128, "vocab-size": 512, "seq-len": 64, "batch": 2}
"""In its place in a rehearsal."""
PEERS = {
    "huggingface": ("transformers", "accelerate"),
    "litgpt": ("litgpt",),
    "torchtitan": ("torchtitan",),
    "plain": (),
}
"""Contender of `train_step.py` -> the packages that it needs."""
TINY = (
    *("--launch.processes", "1", "--model.preset", "llama-5m", "--data.seq-len", "256"),
    *("--train.global-batch", "8", "--evaluate.every_steps", "0"),
)
FAR_OFF = 2e-3
"""Relative difference of losses in fp32, GPU against CPU, after PARITY_STEPS steps, that is no rounding any more."""
PARITY_STEPS = 20


@dataclass
class Options:
    out: Path | None = None
    """Folder of the results, which must not exist; none: gpu-DATE here."""
    only: tuple[str, ...] = ()
    """Run these stages alone."""
    first: str | None = None
    """Begin with this stage."""
    rehearse: bool = False
    """Run the stages on the CPU with a tiny model, to see that each command is as it should be."""


@dataclass
class Outcome:
    """What became of a stage."""

    state: str
    """passed, failed, or left out."""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


class Failed(Exception):
    """A stage did not do what it should; the text says where to read on."""


class Day:
    """The results' folder, and how commands are run into it."""

    def __init__(self, out: Path, gpus: int, is_rehearsal: bool = False):
        self.out, self.gpus, self.is_rehearsal = out, gpus, is_rehearsal
        self.device = "cpu" if is_rehearsal else "cuda"
        self.model, self.seq_len = ("llama-5m", "256") if is_rehearsal else ("llama3.2-1b", "4096")
        """The preset that is probed, predicted and profiled, and the tokens of its rows."""
        self.notes: list[str] = []

    def run(self, name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> Path:
        """Run a command with its output in `name`.txt, which it returns. Raises: Failed if it ends with an error."""
        log = self.out / f"{name}.txt"
        print(f"  {name}: {' '.join(command)}", flush=True)
        with log.open("w") as file:
            file.write(f"$ {' '.join(command)}\n")
            file.flush()
            ended = subprocess.run(
                command,
                cwd=TREE,
                env=os.environ | (environment or {}),
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if ended.returncode:
            raise Failed(f"exit code {ended.returncode}: read {log}")
        return log

    def argosy(self, name: str, *words: str, environment: dict[str, str] | None = None) -> Path:
        return self.run(name, [PYTHON, "-m", "argosy", *words], environment)

    def run_dir(self, name: str) -> Path:
        return self.out / "runs" / name

    def train(self, name: str, *words: str, environment: dict[str, str] | None = None) -> Path:
        """Train, and return the run's folder."""
        self.argosy(f"train-{name}", "train", *words, "--run-dir", str(self.run_dir(name)), environment=environment)
        return self.run_dir(name)

    def train_model(self, name: str, steps: int, *words: str) -> Path:
        """Train `model`, 8 rows of a GPU in a step, without evaluations, and return the run's folder."""
        rows = ("--data.seq-len", self.seq_len, "--train.global-batch", str(8 * self.gpus))
        more = ("--train.steps", str(steps), "--evaluate.every_steps", "0", "--launch.device", self.device)
        return self.train(name, "--model.preset", self.model, *rows, *more, *words)


def versions(day: Day) -> None:
    """Write down what the figures are of."""
    import torch

    from argosy.accelerator import device_name, numbered, software

    device = torch.device("cpu") if day.is_rehearsal else numbered()
    lines = [
        f"{day.gpus} x {device_name(device)}",
        software(device),
        f"Python {sys.version}",
        f"torch {torch.__version__}",
    ]
    for command in (
        ["nvidia-smi"],
        ["git", "-C", str(TREE), "describe", "--always", "--dirty"],
        [PYTHON, "-m", "pip", "freeze"],
    ):
        try:
            lines.append(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
        except FileNotFoundError:
            lines.append(f"{command[0]}: not here")
    (day.out / "versions.txt").write_text("\n".join(lines))


def tests(day: Day) -> None:
    """The tests that need a GPU."""
    if day.gpus < 2:
        day.notes.append("one GPU: the tests that need two were skipped")
    day.run("tests", [PYTHON, "-m", "pytest", "-m", "gpu", "-rs", "tests"])


def parity(day: Day) -> None:
    """The same run on the CPU and on the GPU, eager and in fp32; then compiled in bf16, beside fp32 on the GPU, and on
    two GPUs with the choices that only GPUs have."""
    plain = "precision=fp32,compile=false"
    length = ("--train.steps", str(PARITY_STEPS))
    where = {"reference": "cpu", "device": day.device}
    runs = {
        name: day.train(f"parity-{name}", *TINY, *length, "--launch.device", device, "--plan", plain)
        for name, device in where.items()
    }
    reference, found = map(_losses, runs.values())
    off = max(abs(a - b) / abs(a) for a, b in zip(reference, found, strict=True))
    day.notes.append(f"loss on the GPU off by {off:.2g} of the CPU's at most")
    if off > FAR_OFF:
        raise Failed(f"losses differ by {off:.2g}, which is no rounding: {reference}, {found}")
    plans = {"bf16": "", "async_tp": ",tp=2,async_tp=true", "user_buffers": ",dp_shard=2,user_buffers=true"}
    for name, more in plans.items():
        if not more or day.gpus >= 2:
            plan = f"precision=bf16{more}"
            day.argosy(f"parity-{name}", "parity", "--plan", plan, "--tolerance", "0.02", "--launch.device", day.device)


def _losses(run_dir: Path) -> list[float]:
    from argosy.observe.events import Metrics

    return [record["loss"] for record in Metrics(run_dir).read() if "loss" in record]


def peers(day: Day) -> None:
    """A step of a 1B model beside each peer that is installed, taking turns."""
    model = SMALL if day.is_rehearsal else ONE_B
    sizes = [word for key, value in model.items() for word in (f"--{key}", str(value))]
    for peer, packages in PEERS.items():
        if missing := [package for package in packages if find_spec(package) is None]:
            day.notes.append(f"{peer}: left out, {missing[0]} is not installed")
            continue
        command = [PYTHON, "benchmarks/train_step.py", *sizes, "--precision", "bf16", "--device", day.device]
        result = ["--json", str(day.out / f"peers-{peer}.json")]
        day.run(f"peers-{peer}", [*command, "--contenders", "argosy", peer, "--rounds", "8", "--steps", "5", *result])


def faults(day: Day) -> None:
    """A worker that is killed before an update and one whose device reports an error: training goes on."""
    rows = {"killed": "kill@exchange:step=7,rank=0", "error": "raise@forward:step=7,rank=0"}
    for name, fault in rows.items():
        words = (*TINY, "--train.steps", "12", "--launch.device", day.device)
        run_dir = day.train(f"fault-{name}", *words, environment={"ARGOSY_FAULTS": fault})
        if len(_losses(run_dir)) != 12:
            raise Failed(f"{run_dir}: not all of its steps are there")
    if day.gpus < 2:
        day.notes.append("one GPU: that NCCL's groups are aborted and survivors live on was not seen")


def probe(day: Day) -> None:
    """Measure the machine."""
    day.argosy("probe", "probe", "--model", day.model, "--out", str(day.out / "cluster.toml"))


def prediction(day: Day) -> None:
    """The planner's prediction beside a run of a 1B model."""
    cluster = day.out / "cluster.toml"
    known = ("--launch.cluster", str(cluster)) if cluster.exists() else ()
    run_dir = day.train_model("1b", 60, *known)
    report = json.loads((run_dir / "report.json").read_text())
    (day.out / "prediction.json").write_text(json.dumps(report.get("prediction", report), indent=1))


def profile(day: Day) -> None:
    """A profile of the 1B model's steps."""
    day.train_model("profile", 20, "--profile", "12:15")


Stage = Callable[[Day], None]
STAGES: tuple[Stage, ...] = (versions, tests, parity, peers, faults, probe, prediction, profile)


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    names = [stage.__name__ for stage in STAGES]
    if unknown := [name for name in (*options.only, *filter(None, [options.first])) if name not in names]:
        print(f"{unknown[0]}: there is no such stage. Stages: {', '.join(names)}.", file=sys.stderr)
        return 2
    if not (gpus := 2 if options.rehearse else _gpus()):
        print("make gpu: torch sees no GPU here. What can be known without one: docs/before-a-gpu.md.", file=sys.stderr)
        return 2
    out = options.out or Path(f"gpu-{datetime.now():%Y-%m-%d-%H%M}")
    out.mkdir(parents=True)
    begins = names.index(options.first) if options.first else 0
    chosen = [stage for stage in STAGES[begins:] if not options.only or stage.__name__ in options.only]
    return run_all(chosen, Day(out.resolve(), gpus, options.rehearse))


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def run_all(stages: Sequence[Stage], day: Day) -> int:
    """Run the stages until one fails, and write the summary after each. Returns the exit code."""
    outcomes: dict[str, Outcome] = {}
    for stage in stages:
        print(f"{stage.__name__}: {(stage.__doc__ or '').splitlines()[0]}", flush=True)
        began, day.notes = time.monotonic(), []
        try:
            stage(day)
            state = "passed"
        except (Failed, OSError, ValueError) as why:  # or what a stage reads is not there, or not as it should be
            state = "failed"
            day.notes.append(f"{type(why).__name__}: {why}")
        outcomes[stage.__name__] = Outcome(state, round(time.monotonic() - began, 1), day.notes)
        summary = {name: asdict(outcome) for name, outcome in outcomes.items()}
        (day.out / "summary.json").write_text(json.dumps(summary, indent=1))
        print(
            "".join(f"  {note}\n" for note in day.notes) + f"  {state} in {outcomes[stage.__name__].seconds} s",
            flush=True,
        )
        if state == "failed":
            print(
                f"stopped: what comes after {stage.__name__} would tell less. {day.out}/summary.json", file=sys.stderr
            )
            return 1
    print(f"all passed: {day.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
