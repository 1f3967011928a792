"""Build the last commit's wheel and sdist into dist/, and try the wheel outside the tree: `make package` calls it.

Both are built twice, in two folders, and must be the same bytes: SOURCE_DATE_EPOCH is the commit's time, and what a
build does not fix of itself (order and times within the sdist) is fixed here. The wheel is built from the sdist.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRIED = (
    *(["--version"], ["--help"], ["plan", "--model", "llama3-8b", "--cluster", "8xh100"], ["watch", "--help"]),
    *(["docs", "--skill"], ["docs", "programs"], ["config", "schema", "--of", "status"], ["train", "--dry-run"]),
)
"""Calls that must work where the tree is not: page, presets, manual and schemas are in the wheel."""


def main() -> None:
    """Build twice, compare, install, try."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = (build(Path(folder) / name) for name in ("first", "second"))
        if first != second:
            sys.exit(f"two builds differ: {[name for name in first if first[name] != second.get(name)]}")
        dist = ROOT / "dist"
        dist.mkdir(exist_ok=True)
        for name, content in first.items():
            (dist / name).write_bytes(content)
        try_wheel(next(dist / name for name in first if name.endswith(".whl")), Path(folder) / "elsewhere")
    for name, content in first.items():
        print(f"dist/{name}  sha256 {hashlib.sha256(content).hexdigest()}")


def build(folder: Path) -> dict[str, bytes]:
    """Return the wheel and the sdist of the last commit, by their names."""
    source, out = folder / "source", folder / "dist"
    git = ["git", "-C", str(ROOT)]
    archive = subprocess.run([*git, "archive", "HEAD"], stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(source, filter="data")
    epoch = subprocess.run([*git, "log", "-1", "--format=%ct"], stdout=subprocess.PIPE, check=True).stdout.decode()
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


def try_wheel(wheel: Path, folder: Path) -> None:
    """Install the wheel in an environment of its own, and call it where the tree is not."""
    venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*pip, f"{wheel}[mcp]"], check=True)
    for words in TRIED:
        subprocess.run([folder / "bin" / "argosy", *words], cwd=folder, check=True, stdout=2)


if __name__ == "__main__":
    main()
