"""Build the last commit's wheel and sdist into dist/, and try the wheel outside the tree: `make package` calls it.

Both are built twice, in two folders, and must be the same bytes: SOURCE_DATE_EPOCH is the commit's time, and what a
build does not fix of itself (order and times within the sdist) is fixed here. The wheel is built from the sdist.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = "mcp,parquet,store"
TOOLS = ("pytest", "hypothesis", "twine==7.0.0")
TRIED = (
    *(["--help"], ["config", "presets"], ["plan", "--model", "llama3-8b", "--cluster", "8xh100"], ["docs", "programs"]),
    *(["docs", "--skill"], ["config", "schema", "--of", "status"], ["train", "--dry-run"]),
    *(
        ["train", "--train.steps", "5"],
        ["status", "runs/demo"],
        ["runs"],
        ["evaluate", "runs/demo", "--max-tokens", "20000"],
    ),
)
"""Calls that must work where the tree is not, the demo's first steps among them."""
TESTED = (
    *("tests/config", "tests/plan/test_plan.py", "tests/watch/test_status.py", "tests/cli/test_frame.py"),
    *("tests/cli/test_config.py", "tests/cli/test_options.py", "tests/cli/test_metrics_command.py"),
    *("tests/cli/test_runs_command.py", "tests/cli/test_train_command.py"),
)
"""Tests of the sdist that run against the wheel, in two minutes."""


def main() -> None:
    """Build twice, compare, install, try."""
    with tempfile.TemporaryDirectory() as folder:
        head = ["git", "-C", ROOT, "rev-parse", "HEAD"]
        commit = subprocess.run(head, stdout=subprocess.PIPE, check=True).stdout.decode().strip()
        first, second = (build(commit, Path(folder) / name) for name in ("first", "second"))
        if first != second:
            sys.exit(f"two builds differ: {[name for name in first if first[name] != second.get(name)]}")
        dist = ROOT / "dist"
        dist.mkdir(exist_ok=True)
        for name, content in first.items():
            (dist / name).write_bytes(content)
        try_package(*(dist / name for name in sorted(first)), commit, Path(folder) / "elsewhere")
    for name, content in first.items():
        print(f"dist/{name}  sha256 {hashlib.sha256(content).hexdigest()}")


def build(commit: str, folder: Path) -> dict[str, bytes]:
    """Return the wheel and the sdist of a commit, by their names."""
    source, out = folder / "source", folder / "dist"
    git = ["git", "-C", str(ROOT)]
    archive = subprocess.run([*git, "archive", commit], stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(source, filter="data")
    epoch = subprocess.run(
        [*git, "log", "-1", "--format=%ct", commit], stdout=subprocess.PIPE, check=True
    ).stdout.decode()
    environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch.strip()}
    subprocess.run([sys.executable, "-m", "build", "--outdir", out, source], env=environment, check=True, stdout=2)
    for path in out.glob("*.tar.gz"):
        fix(path, int(epoch))
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def fix(sdist: Path, epoch: int) -> None:
    """Write the archive anew: names in order, one time, no owner."""
    with tarfile.open(sdist) as old:
        members = sorted((member for member in old if member.isfile()), key=lambda member: member.name)
        texts = [(member, file.read()) for member in members if (file := old.extractfile(member))]
    with (
        sdist.open("wb") as out,
        gzip.GzipFile("", "wb", fileobj=out, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member, text in texts:
            plain = tarfile.TarInfo(member.name)
            plain.size, plain.mtime, plain.mode = len(text), epoch, 0o755 if member.mode & 0o100 else 0o644
            new.addfile(plain, io.BytesIO(text))


def try_package(wheel: Path, sdist: Path, commit: str, folder: Path) -> None:
    """Install the wheel in an environment of its own; use it, and test it with the sdist's tests, without the tree."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*pip, f"{wheel}[{EXTRAS}]", *TOOLS], check=True)
    subprocess.run([python, "-m", "twine", "check", "--strict", wheel, sdist], check=True, stdout=2)
    argosy = folder / "bin" / "argosy"
    version = subprocess.run([argosy, "--version"], cwd=folder, stdout=subprocess.PIPE, check=True).stdout.decode()
    if f"({commit[:8]}), torch " not in version:
        sys.exit(f"argosy --version says {version!r}, and the commit is {commit}")
    for words in TRIED:
        print("$ argosy", *words, file=sys.stderr, flush=True)
        subprocess.run([argosy, *words], cwd=folder, check=True, stdout=2)
    try_page([argosy, "watch", "runs", "--json"], folder)
    with tarfile.open(sdist) as files:
        files.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    shutil.rmtree(unpacked / "src")
    subprocess.run([python, "-m", "pytest", *TESTED], cwd=unpacked, check=True, stdout=2)


def try_page(watch: list[str | Path], folder: Path) -> None:
    """Start `argosy watch`, and have it answer with its page, a file of that, and the run."""
    with subprocess.Popen(watch, cwd=folder, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            for path, holds in (("", b"<html"), ("static/tokens.css", b"color"), ("api/runs", b'"demo"')):
                with urllib.request.urlopen(url + path, timeout=60) as answer:
                    if holds not in answer.read():
                        sys.exit(f"{url}{path}: there is no {holds.decode()} in it")
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
