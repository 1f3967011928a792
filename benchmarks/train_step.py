"""Tokens per second of whole optimizer steps: Argosy and its peers, taking turns in one run.

    python benchmarks/train_step.py                       # all contenders, the model of benchmarks/results
    python benchmarks/train_step.py --contenders argosy plain --rounds 20 --cache ~/.cache/argosy/bench
    python benchmarks/train_step.py --contenders argosy argosy@../other/src   # two checkouts against each other

Each contender lives in its own process, and only one computes at a time. Ratios are of turns taken one after the
other, so that what a busy machine does to one it does to all.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import tyro

from argosy.plan.workload import train_flops_per_token
from contenders import CONTENDERS, Setting

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"
NEEDS = {"huggingface": "accelerate", "litgpt": "litgpt", "torchtitan": "torchtitan"}
"""Contender (compiled or eager) -> the package without which it is left out."""


@dataclass
class Options:
    setting: tyro.conf.OmitArgPrefixes[Setting] = field(default_factory=Setting)
    contenders: tuple[str, ...] = tuple(name for name in CONTENDERS if not name.startswith(("matmuls", "torchtitan")))
    """Those that take part (torchtitan only where it is named); NAME@PATH imports argosy from PATH."""
    rounds: int = 12
    """Turns of each contender."""
    steps: int = 3
    """Optimizer steps of a turn."""
    cache: Path | None = None
    """Keep compile caches here between runs; without it they begin empty, and the cold first step is measured too."""
    json: Path | None = None
    """Write every figure to this file too."""


def _paths() -> list[str]:
    """What the caller lets Python look through."""
    return list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))


def _changed(setting: Setting) -> dict[str, object]:
    """Return what differs from the defaults: another checkout may not know the newest keys."""
    usual = asdict(Setting())
    return {key: value for key, value in asdict(setting).items() if value != usual[key]}


class Contender:
    """One process that waits until it is its turn."""

    def __init__(self, name: str, setting: Setting, cache: Path):
        self.name = name
        kind, _, source = name.partition("@")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(Path(source).resolve() if source else SOURCE), *_paths()]),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / name.replace("/", "_")),
            "TOKENIZERS_PARALLELISM": "false",
        }
        script = HERE / "contenders.py"
        if source and (others := Path(source).resolve().parent / "benchmarks" / "contenders.py").is_file():
            script = others  # another checkout knows how to call itself
        began = time.perf_counter()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (it lives as long as the process)
        self._process = subprocess.Popen(
            [sys.executable, str(script), kind, json.dumps(_changed(setting))],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._hear()
        self.first_step_s = time.perf_counter() - began

    def turn(self, length: int) -> dict[str, list[float]]:
        """What it measured in a turn of `length` steps."""
        assert self._process.stdin is not None
        print(length, file=self._process.stdin, flush=True)
        return self._hear()

    def cpu_s(self) -> float:
        """CPU seconds of the process so far, of all its threads."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def leave(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _hear(self) -> dict[str, list[float]]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()  # it says why last
            self._log.seek(0)
            sys.exit(f"{self.name} ended early:\n{self._log.read()[-3000:]}")
        answer: dict[str, list[float]] = json.loads(line)
        return answer


@dataclass
class Figures:
    """What one contender did, a value for each round."""

    first_step_cold_s: float | None
    first_step_warm_s: float
    tokens_per_s: list[float] = field(default_factory=list)
    best_tokens_per_s: float = 0.0


@dataclass
class Peak:
    """Matmul FLOP/s, a value for each round, and the best of all."""

    rounds: list[float] = field(default_factory=list)
    best: float = 0.0

    def add(self, rates: list[float]) -> None:
        self.rounds.append(median(rates))
        self.best = max(self.best, *rates)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    names = [name for name in options.contenders if _is_installed(name)]
    with tempfile.TemporaryDirectory() as fresh:
        cache = (options.cache or Path(fresh)).expanduser().resolve()
        figures, peaks = measure(names, options, cache)
    print(report(figures, peaks, options))
    if options.json:
        values = {name: asdict(each) for name, each in figures.items()}
        peak_values = {name: asdict(each) for name, each in peaks.items()}
        options.json.write_text(
            json.dumps({"setting": asdict(options.setting), "contenders": values, "peaks": peak_values}, indent=1)
        )


def measure(names: list[str], options: Options, cache: Path) -> tuple[dict[str, Figures], dict[str, Peak]]:
    """Start everyone, then go round."""
    setting = options.setting
    contenders, figures = [], {}
    for name in names:
        cold_s = None
        if options.cache is None and not name.endswith("-eager"):
            cold = Contender(name, setting, cache)
            cold_s = cold.first_step_s
            cold.leave()
        contender = Contender(name, setting, cache)
        contender.turn(2)  # what is compiled or allocated late is not measured
        contenders.append(contender)
        figures[name] = Figures(cold_s, contender.first_step_s)
        _say(f"{name}: first step after {contender.first_step_s:.1f} s" + (f", cold {cold_s:.1f} s" if cold_s else ""))
    matmuls = Contender("matmuls", setting, cache)
    peaks = {"square": Peak(), "shapes": Peak()}
    for round_ in range(options.rounds):
        rates = matmuls.turn(options.steps)
        for name, peak in peaks.items():
            peak.add(rates[name])
        first = round_ % len(contenders)  # nobody always follows the same one
        for contender in contenders[first:] + contenders[:first]:
            seconds = contender.turn(options.steps)["seconds"]
            of = figures[contender.name]
            of.tokens_per_s.append(setting.tokens_per_step / median(seconds))
            of.best_tokens_per_s = max(of.best_tokens_per_s, setting.tokens_per_step / min(seconds))
        _say(f"round {round_ + 1} of {options.rounds}", end="\r")
    for contender in [*contenders, matmuls]:
        contender.leave()
    return figures, peaks


def report(figures: dict[str, Figures], peaks: dict[str, Peak], options: Options) -> str:
    """The tables of benchmarks/results, in Markdown."""
    setting = options.setting
    flops = train_flops_per_token(setting.config(), setting.seq_len)
    peers = [name for name in figures if not name.startswith("argosy") and not name.endswith("-eager")]
    rival = max(peers or figures, key=lambda name: median(figures[name].tokens_per_s))
    lines = [
        _machine(setting.threads),
        "",
        f"Model and batch: {setting}, {flops / 1e6:.1f} MFLOP per token. {options.rounds} rounds of "
        f"{options.steps} steps. Matmul peak, GFLOP/s, median (best): "
        + ", ".join(f"{name} {median(peak.rounds) / 1e9:.0f} ({peak.best / 1e9:.0f})" for name, peak in peaks.items())
        + ".",
        "",
        f"| contender | tokens/s | over {rival} | of the square peak | best step, best peak "
        "| of the shapes' peak | first step, cold | warm |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, of in figures.items():
        cells = [
            f"{median(of.tokens_per_s):,.0f}",
            f"{_paired(of.tokens_per_s, figures[rival].tokens_per_s):.3f}",
            f"{flops * _paired(of.tokens_per_s, peaks['square'].rounds):.1%}",
            f"{flops * of.best_tokens_per_s / peaks['square'].best:.1%}",
            f"{flops * _paired(of.tokens_per_s, peaks['shapes'].rounds):.1%}",
            f"{of.first_step_cold_s:.1f} s" if of.first_step_cold_s else "–",
            f"{of.first_step_warm_s:.1f} s",
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _paired(ours: list[float], theirs: list[float]) -> float:
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def _machine(threads: int) -> str:
    import torch

    cpu = Path("/proc/cpuinfo").read_text().split("model name\t: ")[1].splitlines()[0]
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = f"{torch.cuda.get_device_name()}; " if torch.cuda.is_available() else ""
    return (
        f"{gpu}{cpu}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, {platform.system()}; {threads} threads; "
        f"Python {platform.python_version()}, torch {torch.__version__}."
    )


def _is_installed(name: str) -> bool:
    package = NEEDS.get(name.partition("@")[0].removesuffix("-eager"))
    if package is None or find_spec(package):
        return True
    _say(f"{name} is left out: {package} is not installed (see benchmarks/README.md)")
    return False


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
