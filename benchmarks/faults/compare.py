"""The same faults against Argosy, against plain torchrun with DCP, and against torchft: who is back when, with what.

    python benchmarks/faults/compare.py RUN.toml --seed 7 --every-s 30
    python benchmarks/faults/compare.py RUN.toml --contenders argosy torchrun --kinds kill

RUN.toml names a prepared text, a number of steps and checkpoint.every_steps. Each contender trains alone, first
undisturbed and then with faults drawn from the seed: SIGKILL to (and with --kinds stop, SIGSTOP of) a random worker.
Goodput is the time of the undisturbed training over that of the disturbed one, which is given up after `--give-up`
times as long. torchft is left out where it is not installed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import tyro

from argosy.chaos.campaign import PlannedFault, command_of, descendants, is_alive
from argosy.chaos.run import draw, run_chaos
from argosy.config.load import load
from argosy.plan.plan import Plan

HERE = Path(__file__).resolve().parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "1000", "--monitor-interval", "0.1"]
AS_IT_WORKS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""With the store shared between attempts, restarts of torchrun fail at random."""
LIGHTHOUSE, FIRST_PORT = "http://localhost:29510", 29600
Starter = Callable[[Path, Path, int, float], list[tuple[list[str], dict[str, str]]]]
"""(run file, folder, processes, timeout_s) -> commands, each with what it needs in its environment."""


@dataclass
class Options:
    run_file: tyro.conf.Positional[Path]
    seed: int = 7
    every_s: float = 30.0
    """Seconds between faults, on average."""
    kinds: tuple[str, ...] = ("kill",)
    """kill, stop."""
    contenders: tuple[str, ...] = ("argosy", "torchrun", "torchft")
    timeout_s: float = 30.0
    """How long a collective of a peer may wait: theirs is how a stopped process is noticed."""
    give_up: float = 10.0
    folder: Path = Path("runs/fault-benchmark")


@dataclass
class Result:
    """What a contender came to."""

    alone_s: float
    disturbed_s: float
    finished: bool
    again_s: list[float] = field(default_factory=list)
    """Seconds after each fault until a step was made that had not been made before."""
    steps_repeated: int = 0
    same_losses: bool = False

    def line(self, name: str) -> str:
        goodput = f"{self.alone_s / self.disturbed_s:.0%}" if self.finished else "did not end"
        again = f"{median(self.again_s):.1f}, {max(self.again_s):.1f}" if self.again_s else "-"
        return f"| {name} | {len(self.again_s)} | {goodput} | {again} | {self.steps_repeated} | {self.same_losses} |"


def torchrun(run_file: Path, folder: Path, processes: int, timeout_s: float) -> list[tuple[list[str], dict[str, str]]]:
    script = [str(HERE / "torchrun_dcp.py"), str(run_file), str(folder), str(timeout_s)]
    return [([*TORCHRUN, "--standalone", "--nproc-per-node", str(processes), *script], AS_IT_WORKS)]


def torchft(run_file: Path, folder: Path, processes: int, timeout_s: float) -> list[tuple[list[str], dict[str, str]]]:
    script = [str(HERE / "torchft_ddp.py"), str(run_file), str(folder), str(timeout_s)]
    lighthouse = ["torchft_lighthouse", "--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "1000"]
    groups = [
        (
            [*TORCHRUN, "--nproc-per-node", "1", "--master-port", str(FIRST_PORT + group), *script],
            {
                "TORCHFT_LIGHTHOUSE": LIGHTHOUSE,
                "REPLICA_GROUP_ID": str(group),
                "NUM_REPLICA_GROUPS": str(processes),
                **AS_IT_WORKS,
            },
        )
        for group in range(processes)
    ]
    return [(lighthouse, {}), *groups]


PEERS: dict[str, Starter] = {"torchrun": torchrun, "torchft": torchft}


def train(
    starter: Starter, options: Options, folder: Path, faults: list[PlannedFault], limit_s: float
) -> tuple[float, bool]:
    """Return seconds from the first step to the last, and True if the last was made within `limit_s`."""
    folder.mkdir(parents=True)
    run = load(options.run_file)
    commands = starter(options.run_file, folder, Plan.parse(run.plan).world_size, options.timeout_s)
    left, injected = list(faults), []
    with ExitStack() as stack, (folder / "log").open("wb") as log:
        processes = []
        for command, extra in commands:
            environment = os.environ | {"OMP_NUM_THREADS": "1"} | extra
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            stack.callback(end, process)
            processes.append(process)
        began = time.monotonic()
        while time.monotonic() - began < limit_s:
            time.sleep(0.05)
            steps = progress(folder)
            if steps and steps[-1]["step"] == run.train.steps - 1:
                break
            if steps and left and time.time() - steps[0]["time_s"] >= left[0].at_s:
                victims = [pid for process in processes for pid in workers(process.pid)]
                fault = left.pop(0)
                if victims:  # else it is left out: several must not come together when somebody is back
                    injected.append(time.time())
                    pid = sorted(victims)[int(fault.pick * len(victims))]
                    os.kill(pid, signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)
    (folder / "injected.json").write_text(json.dumps(injected))
    steps = progress(folder)
    finished = bool(steps) and steps[-1]["step"] == run.train.steps - 1
    return (steps[-1]["time_s"] - steps[0]["time_s"] if steps else limit_s), finished


def end(process: subprocess.Popen[bytes]) -> None:
    for pid in [*descendants(process.pid), process.pid]:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def workers(launcher: int) -> list[int]:
    """The training processes of a torchrun."""
    scripts = ("torchrun_dcp.py", "torchft_ddp.py")
    return [pid for pid in descendants(launcher) if any(word.endswith(scripts) for word in command_of(pid))]


def progress(folder: Path) -> list[dict[str, float]]:
    path = folder / "progress.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def of_peer(name: str, options: Options) -> Result:
    alone, disturbed = options.folder / name / "alone", options.folder / name / f"seed-{options.seed}"
    alone_s, finished = train(PEERS[name], options, alone, [], 3600.0)
    assert finished, f"{name} does not train undisturbed: see {alone / 'log'}"
    limit_s = options.give_up * alone_s
    faults = draw(options.seed, limit_s, options.every_s, options.kinds)
    disturbed_s, finished = train(PEERS[name], options, disturbed, faults, limit_s)
    steps = progress(disturbed)
    injected = json.loads((disturbed / "injected.json").read_text())
    again = []
    for time_s in injected:
        most = max((step["step"] for step in steps if step["time_s"] < time_s), default=-1)
        later = (step["time_s"] - time_s for step in steps if step["time_s"] > time_s and step["step"] > most)
        again += [*later][:1]
    losses = [{step["step"]: step["loss"] for step in progress(folder)} for folder in (alone, disturbed)]
    repeated = len(steps) - len({step["step"] for step in steps})
    return Result(alone_s, disturbed_s, finished, again, repeated, losses[0] == losses[1])


def of_argosy(options: Options) -> Result:
    folder = options.folder / "argosy"
    report = run_chaos(
        options.run_file, folder, seed=options.seed, every_s=options.every_s, kinds=options.kinds, say=lambda _: None
    )
    again = [fault.again_s for fault in report.faults if fault.again_s is not None]
    lost = sum(fault.steps_lost or 0 for fault in report.faults)
    return Result(report.reference_s, report.chaos_s, report.finished, again, lost, report.same_losses)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started is ended
    options.folder = options.folder.absolute()
    options.run_file = options.run_file.absolute()
    print("| contender | faults | goodput | training again after s (median, worst) | steps repeated | same losses |")
    print("|---|---|---|---|---|---|")
    for name in options.contenders:
        if name == "torchft" and find_spec("torchft") is None:
            print("| torchft | not installed | | | | |")
            continue
        result = of_argosy(options) if name == "argosy" else of_peer(name, options)
        print(result.line(name), flush=True)


if __name__ == "__main__":
    main()
