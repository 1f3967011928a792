from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("starlette")

from argosy.watch import metrics_table as preview_module
from argosy.watch.metrics_table import PREVIEW_LINES, preview
from run_folders import Made, append
from watch.served import served

STEPS = 4000


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    Made(steps=STEPS, total_steps=2 * STEPS, ranks=1, is_finished=False).write(root / "long")
    return root


@pytest.fixture(autouse=True)
def is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview_module, "LONG_BYTES", 2**20)


def test_a_preview_has_lines_of_the_whole_run_and_the_last_one(root: Path) -> None:
    found = preview(root / "long")
    assert found is not None
    steps = found.steps["step"]
    assert 0.9 * PREVIEW_LINES < len(steps) <= PREVIEW_LINES + 1
    assert steps[0] < 10 and steps[-1] == STEPS - 1
    assert max(steps[1:] - steps[:-1]) < 10


def test_a_short_run_one_that_is_gone_and_one_elsewhere_have_none(root: Path, tmp_path: Path) -> None:
    append(tmp_path / "short" / "metrics.jsonl", {"step": 0, "loss": 1.0})
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "metrics.jsonl").symlink_to(root / "long" / "metrics.jsonl")
    assert [preview(tmp_path / name) for name in ("short", "gone", "away")] == [None, None, None]


def test_lines_that_are_no_records_are_passed_over(tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl", b"".join(b'{"step": %d, "loss": 1.5, "x": {}}\n' % n for n in range(50_000)))
    append(tmp_path / "metrics.jsonl", b"[1]\n{]\n" * 20_000 + b'{"step": 70000, "loss": 2.5}\n{"step": 7')
    found = preview(tmp_path)
    assert found is not None and found.steps["step"][-1] == 70_000
    assert set(found.steps["loss"]) == {1.5, 2.5}


def test_a_file_of_giant_lines_has_none(tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl", b'{"step": 1, "loss": 1.0, "x": "' + b"a" * 2**22 + b'"}\n')
    assert preview(tmp_path) is None


def test_the_server_previews_until_the_run_was_read(root: Path) -> None:
    with served(root) as server:
        first = server.get("/api/runs/long/preview?keys=loss,lr&points=100").json()
        whole = server.get("/api/runs/long/series?keys=loss,lr&points=100").json()
        again = server.get("/api/runs/long/preview?keys=loss,lr&points=100").json()
    assert first["is_preview"] and not whole["is_preview"] and again == whole
    assert first["last"] == whole["last"] == STEPS - 1
    assert len(first["step"]) == 100
    for key in ("loss", "lr"):
        ours, all_of_it = first["keys"][key]["mean"], whole["keys"][key]["mean"]
        assert ours == pytest.approx(all_of_it, rel=0.02)
