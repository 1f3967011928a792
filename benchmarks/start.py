"""What starting costs: CPU-seconds of `argosy train` on a tiny model, of one checkout beside another.

    python benchmarks/start.py OTHER/.venv/bin/argosy [--pairs 5] [--compile]

The commands take turns, on one thread each. A command's CPU time includes that of all processes that it waits for:
the fork server, workers, coordinator and checkpoint writers. It runs ten steps on two processes, without compiling, or
compiles with an empty cache.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from commands import RUN_FILE
from tiny import prepare_corpus


def cpu_s_of_children() -> float:
    """CPU seconds of the processes that ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def start(command: str, folder: Path, name: str) -> float:
    """CPU seconds of one run."""
    before = cpu_s_of_children()
    words = [command, "train", "run.toml", "--run-dir", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / f"{name}-cache")}
    subprocess.run(words, cwd=folder, env=environment, capture_output=True, check=True)
    return cpu_s_of_children() - before


def main() -> None:
    """Print each pair, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("other", help="the argosy command to compare with")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    asked = parser.parse_args()
    commands = {"other": asked.other, "this": str(Path(sys.executable).parent / "argosy")}
    found: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        corpus = prepare_corpus(folder / "corpus")
        text = RUN_FILE.format(corpus=corpus, steps=10, every_steps=2, processes=2)
        (folder / "run.toml").write_text(text.replace("compile=false", "compile=true") if asked.compile else text)
        for pair in range(asked.pairs):
            for name, command in commands.items():
                found[name].append(start(command, folder, f"{name}-{pair}"))
            print("  ".join(f"{name} {seconds[-1]:.2f} s" for name, seconds in found.items()), flush=True)
    other, this = (median(seconds) for seconds in found.values())
    print(f"median: other {other:.2f}, this {this:.2f} CPU-seconds; ratio {this / other:.2f}")


if __name__ == "__main__":
    main()
