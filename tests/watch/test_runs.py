from __future__ import annotations

from pathlib import Path

import pytest

from argosy.errors import UserError
from argosy.watch.runs import find_runs, run_folder
from run_folders import Made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("b", "a", "team/deep/c", "a/checkpoints/inner", ".hidden/d"):
        Made(steps=2).write(tmp_path / "runs" / name)
    (tmp_path / "runs" / "foreign").mkdir()
    (tmp_path / "runs" / "foreign" / "photo.jpg").write_bytes(b"\xff")
    Made(steps=2).write(tmp_path / "outside")
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "runs" / "circle").symlink_to(tmp_path / "runs")
    return tmp_path / "runs"


def test_runs_are_found_under_a_folder(root: Path) -> None:
    assert list(find_runs(root)) == ["a", "b", "team/deep/c"]


def test_a_run_that_is_named_itself_is_found(root: Path) -> None:
    assert find_runs(root / "a") == {"a": root / "a"}
    assert run_folder(root / "a", "a") == root / "a"


def test_a_folder_without_runs_has_none(root: Path) -> None:
    assert find_runs(root / "foreign") == {}
    assert find_runs(root / "missing") == {}


def test_an_id_names_a_run(root: Path) -> None:
    assert run_folder(root, "team/deep/c") == root / "team" / "deep" / "c"


@pytest.mark.parametrize(
    "run_id",
    [
        "..", "../outside", "a/../../outside", "a/..", "./a", "", "/etc", "/", "//etc/passwd", "../../etc/passwd",
        "..\\outside", "a//", "a/metrics.jsonl", "a\0", "x" * 5000, "link", ".hidden/d", "foreign", "missing", ".",
    ],
)  # fmt: skip
def test_no_id_leads_out_of_the_folder(root: Path, run_id: str) -> None:
    with pytest.raises(UserError, match="no run"):
        run_folder(root, run_id)
