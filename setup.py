"""What pyproject.toml cannot say: packages built from a checkout hold its commit, which `argosy --version` names."""

from __future__ import annotations

import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent


class BuildPython(build_py):
    """Builds what goes into a wheel."""

    def run(self) -> None:
        """Build it."""
        super().run()
        if not self.editable_mode:  # there the checkout itself is asked
            write_commit(Path(self.build_lib) / "argosy")


class BuildSource(sdist):
    """Builds an sdist."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Lay out its files."""
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir) / "src" / "argosy")


def write_commit(package: Path) -> None:
    """Write the commit of this checkout; a `git archive` and what is built from it hold theirs already."""
    if not (ROOT / ".git").exists():
        return
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # no git here, or no commit yet: --version names none
        return
    (package / "COMMIT").unlink(missing_ok=True)  # it may be a link to the checkout's
    (package / "COMMIT").write_text(commit, encoding="utf-8")


setup(cmdclass={"build_py": BuildPython, "sdist": BuildSource})
