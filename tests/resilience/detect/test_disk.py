"""A disk that fails, fills up or slows down is told; one that is merely busy is not."""

from __future__ import annotations

import errno
import random
from dataclasses import replace
from pathlib import Path

import pytest

from argosy.resilience.detect.disk import DiskDetector, DiskProbe, DiskReading
from waiting import wait_until

WELL = DiskReading(100 * 2**30, 200 * 2**30, 10**6, 2 * 10**6, False, 0.01)


@pytest.fixture
def disk() -> DiskDetector:
    """With a history of writes that take 10 ms."""
    disk = DiskDetector(Path("/run"))
    for _ in range(20):
        assert not disk.observe(WELL)
    return disk


def kinds(disk: DiskDetector, **values: object) -> list[str]:
    return [finding.kind for finding in disk.observe(replace(WELL, **values))]  # type: ignore[arg-type]


def test_a_write_that_fails_is_told_once_with_its_error(disk):
    (finding,) = disk.observe(replace(WELL, write_s=None, error=errno.EIO))
    assert finding.kind == "disk_failed" and finding.evidence == {"errno": "EIO"}
    assert "Input/output error" in finding.why
    assert not kinds(disk, write_s=None, error=errno.EIO)
    assert not kinds(disk)
    assert kinds(disk, write_s=None, error=errno.ENOSPC) == ["disk_failed"]


def test_a_disk_that_became_read_only_is_told(disk):
    assert kinds(disk, is_read_only=True) == ["disk_failed"]


def test_several_slow_writes_in_a_row_are_told(disk):
    assert not kinds(disk, write_s=5.0) and not kinds(disk, write_s=5.0)
    assert kinds(disk, write_s=5.0) == ["disk_slow"]
    assert not kinds(disk, write_s=5.0)
    assert not kinds(disk)


def test_now_and_then_a_slow_write_is_nothing(disk):
    noise = random.Random(0)
    for _ in range(1000):
        assert not kinds(disk, write_s=8.0 if noise.random() < 0.05 else noise.lognormvariate(-4, 0.8))
        assert not kinds(disk, write_s=0.01)


def test_a_disk_that_was_always_slow_is_usual():
    disk = DiskDetector(Path("/run"))
    for _ in range(50):
        assert not kinds(disk, write_s=3.0)


def test_a_write_that_does_not_return_is_told(disk):
    assert not kinds(disk, write_s=None, pending_s=10.0)
    assert kinds(disk, write_s=None, pending_s=31.0) == ["disk_slow"]


def test_a_disk_that_is_nearly_full_is_told(disk):
    assert kinds(disk, free_bytes=2**30) == ["disk_full"]
    assert not kinds(disk, free_bytes=2**30)
    assert kinds(disk, free_inodes=100) == ["disk_full"]


def test_a_small_share_of_a_huge_disk_is_enough(disk):
    assert not kinds(disk, free_bytes=50 * 2**30, total_bytes=10**5 * 2**30)


def test_a_file_system_without_inodes_is_well(disk):
    assert not kinds(disk, free_inodes=0, total_inodes=0)


def after_a_write(probe: DiskProbe) -> DiskReading:
    """The reading that has the outcome of the first trial write."""

    def written() -> DiskReading | None:
        reading = probe.read()
        return None if reading.write_s is None and reading.error is None else reading

    found = wait_until(written)
    assert found is not None
    return found


def test_a_real_disk_is_probed_and_nothing_is_left_behind(tmp_path):
    reading = after_a_write(DiskProbe(tmp_path))
    assert reading.write_s < 10 and reading.free_bytes > 0 and reading.error is None
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_gone_is_an_error(tmp_path):
    assert after_a_write(DiskProbe(tmp_path / "gone")).error == errno.ENOENT
