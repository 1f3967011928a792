"""metrics.jsonl says each step once, whatever was lost and run again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from argosy.observe.metrics import Metrics, forget_peak_memory, peak_memory_bytes


@pytest.fixture
def metrics(tmp_path) -> Metrics:
    written = Metrics(tmp_path)
    for step in range(6):
        written.write({"step": step, "loss": 6.0 - step})
        if step % 2:
            written.write({"step": step, "validation_loss": 7.0 - step})
    return written


def steps(metrics: Metrics, key: str) -> list[int]:
    return [record["step"] for record in metrics.read() if key in record]


@pytest.mark.parametrize("resumed_at", [0, 3, 6, 100])
def test_steps_that_are_run_again_are_forgotten_with_their_evaluations(metrics, resumed_at):
    metrics.forget_from(resumed_at)
    assert steps(metrics, "loss") == [step for step in range(6) if step < resumed_at]
    assert steps(metrics, "validation_loss") == [step for step in (1, 3, 5) if step < resumed_at]


def test_a_line_cut_off_by_a_kill_is_forgotten_too(metrics):
    with metrics.path.open("a") as file:
        file.write('{"step": 3, "lo')
    metrics.forget_from(4)
    metrics.write({"step": 4, "loss": 0.0})
    assert steps(metrics, "loss") == [0, 1, 2, 3, 4]


def test_nothing_is_forgotten_of_a_run_that_has_not_begun(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.forget_from(0)
    assert metrics.read() == [] and not metrics.path.exists()


def test_peak_memory_is_what_the_system_says():
    status = Path("/proc/self/status").read_text()
    peak_kib = int(status.split("VmHWM:")[1].split()[0])
    assert peak_memory_bytes(torch.device("cpu")) == pytest.approx(peak_kib * 1024, rel=0.05)


def test_the_peak_of_memory_can_begin_anew():
    device = torch.device("cpu")
    large = bytearray(b"x" * 2**28)
    assert len(large) < peak_memory_bytes(device)
    del large
    before = peak_memory_bytes(device)
    forget_peak_memory(device)
    assert peak_memory_bytes(device) < before - 2**27


def test_it_is_known_what_was_written_of_the_last_steps(metrics):
    assert metrics.has(5, "validation_loss") and not metrics.has(4, "validation_loss")
    assert metrics.has(4, "loss") and not metrics.has(6, "loss")


@pytest.mark.parametrize("chunk", [1, 7, 64, 2**16])
@pytest.mark.parametrize("resumed_at", [0, 3, 6])
def test_a_file_is_read_backwards_in_pieces_of_any_size(metrics, monkeypatch, chunk, resumed_at):
    monkeypatch.setattr("argosy.observe.events.CHUNK_BYTES", chunk)
    assert [record["step"] for record in metrics.last(4)] == [2, 3, 4, 5]
    metrics.forget_from(resumed_at)
    assert [record["step"] for record in metrics.last(100)] == list(range(resumed_at))
    assert steps(metrics, "validation_loss") == [step for step in (1, 3, 5) if step < resumed_at]


def test_who_may_not_write_any_more_adds_nothing(tmp_path):
    in_force = True
    metrics = Metrics(tmp_path, lambda: in_force)
    metrics.write({"step": 0})
    in_force = False
    metrics.write({"step": 1})
    assert metrics.read() == [{"step": 0}]
