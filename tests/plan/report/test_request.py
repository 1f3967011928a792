"""What a user leaves out: the machine at hand, the batch, the length of a sequence, the vocabulary."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from argosy.config.load import load
from argosy.errors import UserError
from argosy.plan.report.report import usual_batch
from argosy.plan.report.request import plan_request, this_machine


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Let nvidia-smi list these GPUs, on a machine that nobody described."""

    def there_are(*names: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + "".join(f"echo '{name}'\n" for name in names))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.chdir(tmp_path)

    return there_are


def devices(**launch: object) -> tuple[str, int]:
    cluster = this_machine(load(None, {f"launch.{key}": value for key, value in launch.items()} | {"plan": "auto"}))
    return cluster.device.name, cluster.devices


def test_the_driver_s_gpus_are_the_machine(gpus) -> None:
    gpus(*8 * ["NVIDIA H100 80GB HBM3"])
    assert devices(processes=0) == ("H100-SXM", 8)
    assert devices(processes=2) == ("H100-SXM", 2)
    assert devices(processes=2, device="cpu") == ("CPU", 2)


def test_gpus_that_cuda_may_not_see_do_not_count(gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(*8 * ["NVIDIA H200"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert devices(processes=0) == ("H200", 2)


def test_without_gpus_it_is_one_process_on_the_cpu(gpus) -> None:
    gpus()
    assert devices(processes=0) == ("CPU", 1)


@pytest.mark.parametrize(
    ("names", "message"),
    [(["NVIDIA H100 80GB HBM3", "NVIDIA H200"], "GPUs of several kinds"), (["NVIDIA Titan Q"], "no device is called")],
)
def test_gpus_that_the_catalogue_cannot_tell_are_no_silent_default(gpus, names: list[str], message: str) -> None:
    gpus(*names)
    with pytest.raises(UserError, match=message):
        devices(processes=0)


def test_sizes_that_are_not_said_are_assumed_and_named() -> None:
    request = plan_request(model="llama-20m", cluster="8xh100")
    run = request.run
    assert (run.data.seq_len, run.model.vocab_size) == (min(8192, run.model.max_seq_len), 4096)
    assert run.train.global_batch == usual_batch(run, run.data.seq_len)
    assert len(request.assumed) == 3
    said = plan_request(model="llama3-8b", cluster="8xh100", seq_len=4096, global_batch=32)
    assert (said.run.data.seq_len, said.run.train.global_batch, said.assumed) == (4096, 32, ())


def test_the_usual_batch_is_a_power_of_two_near_the_law() -> None:
    """DeepSeek LLM (Bi et al. 2024): 67B was trained with 4608 x 4096 = 18.9M tokens a step, 7B with 9.4M, on 2T."""
    run = load(None, {"model.preset": "llama3-8b"})
    batch = usual_batch(run, 8192)
    compute = 6 * 20 * 8.03e9**2
    assert math.log2(batch) % 1 == 0
    assert batch * 8192 == pytest.approx(0.292 * compute**0.3271, rel=0.45)


def test_a_run_s_length_is_the_tokens_to_train_on() -> None:
    run = load("parity")
    assert plan_request(source="parity").tokens == run.train.steps * run.train.global_batch * run.data.seq_len
    assert plan_request(source="parity", tokens=1e6).tokens == 1e6


def test_pins_take_the_place_of_the_trainer_s_plan() -> None:
    assert plan_request(source="parity").given is not None
    assert plan_request(source="parity", fix="microbatch=1").given is None
