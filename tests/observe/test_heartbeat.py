"""What a worker shows of itself can be read at any moment, whatever becomes of the worker."""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from argosy.observe.heartbeat import (
    LOOP_VERSION_SLOT,
    NAME_BYTES,
    Heartbeat,
    HeartbeatReading,
    UnreadHeartbeat,
    heartbeat_path,
    read_heartbeat,
)
from waiting import wait_until


@pytest.fixture
def heartbeat(tmp_path: Path) -> Iterator[Heartbeat]:
    heartbeat = Heartbeat(tmp_path)
    yield heartbeat
    heartbeat.close()


def reading(heartbeat: Heartbeat) -> HeartbeatReading:
    found = read_heartbeat(heartbeat.path)
    assert found is not None
    return found


def test_what_is_written_is_read(heartbeat):
    heartbeat.join(generation=3, rank=7, sequences=lambda: {"world#0": 12, "x" * 80: 2**40})
    heartbeat.begin(41)
    heartbeat.enter("backward")
    heartbeat.took(0.25)
    seen = reading(heartbeat)
    assert (seen.pid, seen.generation, seen.rank, seen.step, seen.phase) == (os.getpid(), 3, 7, 41, "backward")
    assert seen.busy_s == {41: 0.25}
    assert 0 <= time.monotonic_ns() - seen.phase_since_ns < 10e9
    assert seen.peak_memory_bytes > 2**20
    wait_until(lambda: reading(heartbeat).sequences == {"world#0": 12, "x" * NAME_BYTES: 2**40})


def test_the_beat_goes_on_while_the_loop_is_busy_elsewhere(heartbeat):
    before = reading(heartbeat).beats
    wait_until(lambda: reading(heartbeat).beats >= before + 3)
    assert reading(heartbeat).phase == "starting"


def test_the_last_steps_are_remembered_and_another_world_begins_anew(heartbeat):
    for step in range(100):
        heartbeat.begin(step)
        heartbeat.took(step / 1000)
    assert reading(heartbeat).busy_s == {step: step / 1000 for step in range(36, 100)}
    heartbeat.join(generation=1, rank=0, sequences=dict)
    seen = reading(heartbeat)
    assert seen.busy_s == {} and seen.step == -1 and seen.phase == "recovering"


def test_a_phase_that_works_in_batches_shows_progress_with_each(heartbeat):
    heartbeat.enter("evaluate")
    before = reading(heartbeat)
    heartbeat.advance()
    after = reading(heartbeat)
    assert after.phase == "evaluate" and after.progress != before.progress


def test_suspicions_outlive_a_world(heartbeat):
    assert reading(heartbeat).suspicions == 0
    heartbeat.suspect()
    heartbeat.suspect()
    heartbeat.join(generation=1, rank=0, sequences=dict)
    assert reading(heartbeat).suspicions == 2


def test_sequence_numbers_that_cannot_be_had_stay_as_they_were(heartbeat):
    def closed() -> dict[str, int]:
        raise RuntimeError("the group is gone")

    heartbeat.join(0, 0, lambda: {"world#0": 5})
    wait_until(lambda: reading(heartbeat).sequences == {"world#0": 5})
    heartbeat.join(1, 0, closed)
    beats = reading(heartbeat).beats
    wait_until(lambda: reading(heartbeat).beats > beats + 1)
    assert reading(heartbeat).sequences == {"world#0": 5}


def test_a_reading_is_never_of_two_moments(heartbeat):
    stop = threading.Event()

    def write() -> None:
        for number in range(10**9):
            if stop.is_set():
                return
            heartbeat.join(generation=number, rank=number, sequences=dict)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            seen = reading(heartbeat)
            assert seen.rank in (seen.generation, -1)
    finally:
        stop.set()
        writer.join()


def test_a_writer_that_died_halfway_can_still_be_read(heartbeat):
    heartbeat.begin(5)
    with heartbeat.path.open("r+b") as page:
        page.seek(8 * LOOP_VERSION_SLOT)
        (version,) = struct.unpack("q", page.read(8))
        page.seek(8 * LOOP_VERSION_SLOT)
        page.write(struct.pack("q", version + 1))  # odd: it has begun to write
    assert reading(heartbeat).step == 5


def test_no_file_is_no_reading_and_another_file_is_refused(tmp_path):
    assert read_heartbeat(tmp_path / "none") is None
    for content in (b"", b"x" * 100, b"x" * 10**5):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(ValueError, match="is no heartbeat"):
            read_heartbeat(tmp_path / "other")


def test_closing_leaves_no_file(tmp_path):
    heartbeat = Heartbeat(tmp_path)
    heartbeat.close()
    assert list(tmp_path.iterdir()) == []


def test_the_beat_of_a_stopped_process_stands_still_and_its_page_outlives_it(tmp_path):
    code = """if True:
        import sys, time
        from pathlib import Path
        from argosy.observe.heartbeat import Heartbeat
        heartbeat = Heartbeat(Path(sys.argv[1]))
        heartbeat.join(1, 2, dict)
        heartbeat.begin(9)
        time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    path = heartbeat_path(tmp_path, process.pid)

    def beats() -> int:
        seen = read_heartbeat(path)
        return -1 if seen is None or seen.step != 9 else seen.beats

    try:
        wait_until(lambda: beats() > 3)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        still = beats()
        time.sleep(0.4)
        assert beats() == still
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: beats() > still)
    finally:
        process.kill()
        process.wait()
    seen = read_heartbeat(path)
    assert seen is not None and (seen.rank, seen.step) == (2, 9)


def test_a_folder_without_room_is_an_error_and_no_signal(tmp_path, monkeypatch):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}"):
        Heartbeat(tmp_path)


def test_a_process_without_an_agent_has_a_heartbeat_like_any_other_without_a_file_or_a_thread():
    threads = threading.active_count()
    unread = UnreadHeartbeat()
    unread.join(1, 0, dict)
    unread.begin(3)
    unread.enter("forward")
    unread.took(0.5)
    unread.can_go_back_to(2)
    unread.suspect()
    unread.close()
    assert threading.active_count() == threads and not hasattr(unread, "path")
