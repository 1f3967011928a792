"""Faults strike where and when they are told to, once; without them a fault point does nothing."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from argosy import faults
from argosy.errors import UserError
from argosy.faults import arm, fault, parse
from argosy.processes.child import process_state
from waiting import PATIENT_S, wait_until


@pytest.fixture(autouse=True)
def disarmed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("ARGOSY_GENERATION", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    yield
    arm("")


def strikes(point: str, **facts: object) -> bool:
    try:
        fault(point, **facts)  # type: ignore[arg-type]
    except RuntimeError as struck:
        assert "injected fault" in str(struck)
        return True
    return False


def test_a_fault_strikes_while_it_is_armed_and_nothing_happens_without():
    assert not strikes("optimizer", step=5)
    arm("raise@optimizer:every=5")
    assert strikes("optimizer", step=5)
    arm("")
    assert not strikes("optimizer", step=5)
    fault("weights", tensors=lambda: pytest.fail("made for nobody"))


def test_text_and_json_say_the_same():
    text = parse("kill@optimizer:step=5,rank=1; flip@weights:step=7,bit=30 ;eio@save:again=true")
    as_json = json.dumps(
        [
            {"action": "kill", "point": "optimizer", "step": 5, "rank": 1},
            {"action": "flip", "point": "weights", "step": 7, "bit": 30},
            {"action": "eio", "point": "save", "again": True},
        ]
    )
    assert parse(as_json) == text
    assert [str(f) for f in text] == ["kill@optimizer:step=5,rank=1", "flip@weights:step=7", "eio@save:again=True"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill", "not ACTION@POINT"),
        ("kil@optimizer", "did you mean kill"),
        ("kill@optimiser", "did you mean optimizer"),
        ("kill@optimizer:stepp=3", "did you mean step"),
        ("kill@optimizer:step=x", "whole number"),
        ("oom@forward", "gib="),
        ("[{", "JSON"),
        ("[1]", "'1' is no fault"),
        ("kill@forward:again=banana", "truth value"),
        ("kill@forward:every=0", "every = 0 must be at least 1"),
    ],
)
def test_a_mistake_is_refused_with_a_hint(text, said):
    with pytest.raises(UserError, match=said):
        parse(text)


def test_a_fault_strikes_at_its_step_and_rank_once():
    arm("raise@forward:step=5,rank=1")
    assert not strikes("forward", step=4, rank=1)
    assert not strikes("forward", step=5, rank=0)
    assert not strikes("backward", step=5, rank=1)
    assert strikes("forward", step=5, rank=1)
    assert not strikes("forward", step=5, rank=1)


def test_it_strikes_each_rank_once(monkeypatch):
    arm("raise@forward")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert strikes("forward")
        assert not strikes("forward")


def test_again_is_once_a_generation(monkeypatch):
    arm("raise@forward:again=1")
    for generation in ("1", "2"):
        monkeypatch.setenv("ARGOSY_GENERATION", generation)
        assert strikes("forward")
        assert not strikes("forward")


def test_steps_in_a_row_and_every():
    arm("raise@forward:step=3,steps=2")
    assert [step for step in range(8) if strikes("forward", step=step)] == [3, 4]
    arm("raise@forward:every=3,step=2")
    assert [step for step in range(10) if strikes("forward", step=step)] == [3, 6, 9]


def test_a_fault_strikes_as_often_as_it_is_told_to_also_after_a_restart(tmp_path):
    arm("raise@forward:step=3,times=3", tmp_path)
    assert strikes("forward", step=3) and strikes("forward", step=3)
    arm("raise@forward:step=3,times=3", tmp_path)
    assert [strikes("forward", step=3) for _ in range(3)] == [True, False, False]


def test_after_a_step_is_the_first_that_comes_by():
    arm("raise@rename:after=7")
    assert [step for step in range(0, 30, 5) if strikes("rename", step=step)] == [10]


def test_a_fraction_is_reached_or_passed():
    arm("eio@save:fraction=0.5")
    fault("save", fraction=0.4)
    with pytest.raises(OSError) as caught:
        fault("save", fraction=0.6)
    assert caught.value.errno == errno.EIO


def test_a_disk_can_be_full():
    arm("enospc@save")
    with pytest.raises(OSError) as caught:
        fault("save")
    assert caught.value.errno == errno.ENOSPC


def test_what_struck_is_recorded_and_not_met_again(tmp_path):
    arm("raise@commit:step=2", tmp_path)
    assert strikes("commit", step=2, rank=3)
    (record,) = map(json.loads, (tmp_path / "events" / "faults.jsonl").read_text().splitlines())
    assert record["event"] == "fault" and record["rank"] == 3 and record["step"] == 2
    assert record["fault"] == "raise@commit:step=2"
    arm("raise@commit:step=2", tmp_path)  # as after a restart
    assert not strikes("commit", step=2, rank=3)
    assert strikes("commit", step=2, rank=0)


def test_the_folder_may_come_from_the_environment_later(tmp_path, monkeypatch):
    arm("raise@commit")
    monkeypatch.setenv("ARGOSY_RUN_DIR", str(tmp_path))
    assert strikes("commit")
    assert (tmp_path / "events" / "faults.jsonl").exists()


def test_a_point_that_does_not_know_the_step_is_of_the_one_whose_batch_was_taken():
    arm("raise@bucket:step=3")
    struck = []
    for step in range(5):
        fault("batch", step=step)
        fault("loader", step=step + 3)
        struck.append(strikes("bucket"))
    assert struck == [False, False, False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("bit", [0, 7, 15, 31, 63])
def test_one_bit_of_one_number_flips(dtype, bit):
    tensor = torch.ones(6).to(dtype)
    before = tensor.view(torch.uint8).clone()
    arm(f"flip@weights:bit={bit},index=4,tensor=b*")
    fault("weights", tensors=lambda: {"a": torch.zeros(1), "b.weight": tensor})
    changed = (before ^ tensor.view(torch.uint8)).tolist()
    width = tensor.element_size()
    expected = [0] * (6 * width)
    place = bit % (8 * width)
    expected[4 * width + place // 8] = 1 << place % 8
    assert changed == expected


def test_numbers_become_nan_inf_or_large():
    tensor = torch.ones(3, requires_grad=True)
    arm("nan@gradient:index=1;inf@loss;spike@weights:factor=100")
    fault("gradient", tensors=lambda: {"g": tensor})
    assert tensor.isnan().tolist() == [False, True, False]
    fault("loss", tensors=lambda: {"loss": tensor})
    assert tensor.isinf().tolist() == [True, False, False]
    other = torch.ones(2)
    fault("weights", tensors=lambda: {"w": other})
    assert other.tolist() == [100.0, 100.0]


def test_tensors_are_made_only_for_a_fault_that_strikes():
    arm("nan@gradient:step=3")
    fault("gradient", step=2, tensors=lambda: pytest.fail("made for nobody"))


def test_slow_costs_a_multiple_of_the_work():
    arm("slow@forward:factor=3")
    began = time.perf_counter()
    for step in range(3):
        fault("forward", step=step)
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass
    took_s = time.perf_counter() - began
    assert took_s > 0.15 + 2 * 0.1 - 0.02


def killed_by(action: str, timeout_s: float = 30) -> int:
    """How a process ends that meets `action`."""
    code = "from argosy.faults import fault; fault('forward'); print('went on')"
    environment = {**os.environ, faults.FAULTS_VARIABLE: f"{action}@forward"}
    return subprocess.run([sys.executable, "-c", code], env=environment, timeout=timeout_s, check=False).returncode


def test_a_process_can_kill_itself_or_exit():
    assert killed_by("kill") == -signal.SIGKILL
    assert killed_by("exit") == 1


def test_the_lock_of_python_can_be_held():
    code = """if True:
        import threading, time
        from argosy.faults import arm, fault
        beats = []
        threading.Thread(target=lambda: [beats.append(time.sleep(0.01)) for _ in range(10000)], daemon=True).start()
        time.sleep(0.1)
        arm("gil@forward:seconds=0.5")
        before = len(beats)
        began = time.monotonic()
        fault("forward")
        assert time.monotonic() - began >= 0.5
        assert len(beats) <= before + 2, (before, len(beats))
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENT_S)


def test_a_process_can_be_stopped(tmp_path: Path):
    code = "from argosy.faults import fault; fault('loader')"
    environment = {**os.environ, faults.FAULTS_VARIABLE: "stop@loader"}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        wait_until(lambda: process_state(process.pid) == "T")
        process.send_signal(signal.SIGCONT)
        assert process.wait(timeout=PATIENT_S) == 0
    finally:
        process.kill()
        process.wait()
