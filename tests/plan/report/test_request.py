"""What a user leaves out: the machine at hand, the batch, the length of a sequence, the vocabulary."""

from __future__ import annotations

import math

import pytest

from argosy.config.load import load
from argosy.errors import UserError
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.plan import Plan
from argosy.plan.report.report import usual_batch
from argosy.plan.report.request import Question, best_plans, of_model, of_run
from argosy.plan.search.auto import Devices, choose_plan

PARITY = load("parity")
TWO_CPUS = Devices(2, "cpu", fast_bf16=False)


@pytest.mark.parametrize("fast_bf16", [False, True])
def test_a_run_on_the_devices_at_hand_gets_the_trainer_s_plan_and_its_precision(fast_bf16: bool) -> None:
    devices = Devices(2, "cpu", fast_bf16, memory_bytes=3e9)
    run = PARITY.model_copy(update={"plan": "auto"}).with_keys(model={"vocab_size": 4096})
    request = of_run(run, devices, Question())
    assert request.given == choose_plan(run, devices)
    assert request.pins == {"precision": ("bf16" if fast_bf16 else "fp32",)}
    assert request.cluster.device.memory_bytes == 3e9


def test_gpus_are_those_that_the_driver_names() -> None:
    devices = Devices(8, "cuda", True, name="NVIDIA H100 80GB HBM3", memory_bytes=79e9, per_node=8)
    cluster = of_run(PARITY.model_copy(update={"plan": "auto"}), devices, Question()).cluster
    assert (cluster.device.name, cluster.devices, cluster.device.memory_bytes) == ("H100-SXM", 8, 79e9)


def test_what_a_run_fixes_and_what_is_asked_come_before_the_machine_s_precision() -> None:
    run = PARITY.model_copy(update={"plan": "auto,precision=fp32"})
    fast = Devices(2, "cpu", fast_bf16=True)
    assert of_run(run, fast, Question()).pins == {"precision": ("fp32",)}
    assert of_run(run, fast, Question(fix="precision=fp16")).pins == {"precision": ("fp16",)}


def test_sizes_that_are_not_said_are_assumed_and_named() -> None:
    request = of_model("llama-20m", "8xh100", Question())
    run = request.run
    assert (run.data.seq_len, run.model.vocab_size) == (min(8192, run.model.max_seq_len), 4096)
    assert run.train.global_batch == usual_batch(run, run.data.seq_len)
    assert len(request.assumed) == 4
    assert request.assumed[-1].endswith("(20 for each active parameter).")
    said = of_model("llama3-8b", "8xh100", Question(seq_len=4096, global_batch=32, tokens=1e9))
    assert (said.run.data.seq_len, said.run.train.global_batch, said.assumed) == (4096, 32, ())


def test_fine_tuning_is_two_epochs_of_the_data_in_small_batches() -> None:
    request = of_model("llama3-8b", "8xh100", Question(finetune=50e6))
    assert (request.run.data.seq_len, request.run.train.global_batch, request.tokens) == (4096, 128, 100e6)
    assert len(request.assumed) == 3
    assert of_run(PARITY, TWO_CPUS, Question(finetune=1e6)).tokens == 2e6


def test_an_adapter_beside_8b_weights_fits_a_card_of_24_gb() -> None:
    assert best_plans("llama3-8b", "1xrtx-4090", finetune=50e6, lora=16).choices


def test_a_model_that_is_no_preset_keeps_its_sizes_and_gets_a_name() -> None:
    model = load(None, {"model.preset": "llama3.2-1b", "model.layers": 3}).model.model_copy(update={"preset": None})
    run = of_model(model, "8xh100", Question(), name="my model (v2)").run
    assert (run.name, run.model) == ("my-model-v2", model)


@pytest.mark.parametrize(
    ("model", "seq_len", "remedy"),
    [
        ("llama3-70b", 32_768, "--model llama3.1-70b (up to 131072 tokens)."),
        ("llama3.1-70b", 200_000, "Try --seq-len 131072."),
    ],
)
def test_a_sequence_that_is_too_long_is_answered_with_the_model_that_takes_it(model, seq_len, remedy) -> None:
    with pytest.raises(UserError) as error:
        of_model(model, "16xh100", Question(seq_len=seq_len))
    assert str(error.value).startswith(f"--seq-len {seq_len} is more than the model's longest sequence")
    assert str(error.value).endswith(remedy)


def test_a_sequence_may_be_as_long_as_yarn_stretches_the_model():
    yarn = {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 32_768}
    overrides = {"model.preset": "llama3.2-1b", "model.max_seq_len": 40_960, "model.rope_scaling": yarn}
    model = load(None, overrides).model.model_copy(update={"preset": None})
    request = of_model(model, "16xh100", Question(seq_len=131_072))
    assert (request.run.data.seq_len, request.run.model.max_seq_len) == (131_072, 131_072)
    assert any("YaRN" in line for line in request.assumed)
    with pytest.raises(UserError, match="more than the model's longest"):
        of_model(model, "16xh100", Question(seq_len=131_073))


def test_the_user_s_price_takes_the_place_of_the_catalogue_s() -> None:
    assert of_model("llama3-8b", "8xh100", Question(price=1.5)).cluster.price_per_device_h == 1.5
    assert of_run(PARITY, Cluster.parse("2xh100"), Question(price=1.5)).cluster.price_per_device_h == 1.5


def test_the_usual_batch_is_a_power_of_two_near_the_law() -> None:
    """DeepSeek LLM (Bi et al. 2024): 67B was trained with 4608 x 4096 = 18.9M tokens a step, 7B with 9.4M, on 2T."""
    run = load(None, {"model.preset": "llama3-8b"})
    batch = usual_batch(run, 8192)
    compute = 6 * 20 * 8.03e9**2
    assert math.log2(batch) % 1 == 0
    assert batch * 8192 == pytest.approx(0.292 * compute**0.3271, rel=0.45)


def test_a_run_s_length_is_the_tokens_to_train_on() -> None:
    run = PARITY
    assert of_run(run, TWO_CPUS, Question()).tokens == run.train.steps * run.train.global_batch * run.data.seq_len
    assert of_run(run, TWO_CPUS, Question(tokens=1e6)).tokens == 1e6


def test_pins_take_the_place_of_the_trainer_s_plan() -> None:
    assert isinstance(of_run(PARITY, TWO_CPUS, Question()).given, Plan)
    assert of_run(PARITY, TWO_CPUS, Question(fix="microbatch=1")).given is None


def test_a_model_and_a_run_are_planned_for():
    report = best_plans("llama3-8b", "8xh100", seq_len=4096, top=2, fix="tp=2")
    assert (report.seq_len, len(report.choices)) == (4096, 2)
    assert Plan.parse(report.choices[0].plan).tp == 2
    assert best_plans(load("demo"), "2xcpu").devices == 2


def test_a_model_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match="llama3-8b"):
        best_plans("llama3-8", "8xh100")
