"""`benchmarks/planner/score_serving.py`, as one runs it: figures for rows it has never seen, words for bad files."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SCORE = ROOT / "benchmarks/planner/score_serving.py"
PUBLISHED = ROOT / "benchmarks/planner/inference.csv"
METRICS = ("ttft", "tpot", "e2e_latency")


def rows(source: str = "somebody (2027) vLLM 0.10") -> list[dict[str, str]]:
    """Rows of H100s as if an unknown publisher had measured them: nothing is fitted anew."""
    with PUBLISHED.open(newline="") as file:
        found = [row for row in csv.DictReader(file) if row["device"] == "Nvidia H100-80GB"]
    return [{**row, "source": source, "value": f"{1.01 * float(row['value']):.6g}"} for row in found]


def written(path: Path, table: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)
    return path


def score(*words: str) -> tuple[int, str, str]:
    """Run the program in this process. Return its exit code, its output and its errors."""
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.syspath_prepend(str(SCORE.parent))
        code = import_module("score_serving").main(list(words))
    return code, out.getvalue(), err.getvalue()


def test_new_rows_are_scored_by_metric(tmp_path: Path) -> None:
    found = json.loads(score(str(written(tmp_path / "new.csv", rows())), "--json")[1])
    assert {metric: found["all"][metric]["n"] for metric in METRICS} == {"ttft": 8, "tpot": 8, "e2e_latency": 0}
    assert set(found["all"]["tpot"]) == {"n", "median_abs_pct_error", "bias", "coverage_pct"}
    assert found["all"]["tpot"]["median_abs_pct_error"] < 40
    assert found["all"]["e2e_latency"]["coverage_pct"] is None


def test_rows_of_the_file_correct_the_others(tmp_path: Path) -> None:
    path, five = str(written(tmp_path / "new.csv", rows())), ("--calibration-rows", "5")
    ways = ((), five, (*five, "--chosen"))
    alone, *corrected = (json.loads(score(path, "--json", *way)[1])["all"] for way in ways)
    for found in corrected:
        assert sum(found[metric]["n"] for metric in ("ttft", "tpot", "throughput")) == 24 - 5
        assert found["throughput"]["median_abs_pct_error"] < alone["throughput"]["median_abs_pct_error"]


def test_rows_that_cannot_be_predicted_are_counted(tmp_path: Path) -> None:
    bad = [{**row} for row in rows()[:6]]
    bad[0]["device"] = "Abacus 9"
    bad[1]["model"], bad[1]["params_b"] = "a secret", ""
    bad[2]["value"] = "nan"
    bad[3]["metric"] = "joy"
    found = json.loads(score(str(written(tmp_path / "bad.csv", bad)), "--json")[1])
    assert found["skipped"]["n"] == 4
    assert "device 'Abacus 9' is not in the catalogue" in found["skipped"]["why"]


def test_columns_that_say_more_may_be_left_out(tmp_path: Path) -> None:
    """Of an unknown engine on one device; fewer rows than calibrate leave none to be scored."""
    path = tmp_path / "few.csv"
    path.write_text("model,device,batch_or_concurrency,input_len,metric,value\nllama3-8b,H100,1,1024,ttft,0.09\n")
    found = json.loads(score(str(path), "--json")[1])
    assert found["all"]["ttft"]["n"] == 1
    none = json.loads(score(str(path), "--json", "--calibration-rows", "5")[1])
    assert {metric: none["all"][metric]["n"] for metric in METRICS} == dict.fromkeys(METRICS, 0)


@pytest.mark.slow
def test_a_few_published_rows_of_one_engine_are_predicted_without_it(tmp_path: Path) -> None:
    """What is learnt from are the published rows, not those of the file."""
    with PUBLISHED.open(newline="") as file:
        few = [row for row in csv.DictReader(file) if row["source"].startswith("FasterTransformer")][:5]
    found = json.loads(score(str(written(tmp_path / "few.csv", few)), "--json")[1])
    assert found["without_engine"]["e2e_latency"]["n"] == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "line 1: no column model"),
        ("\udc80", "cannot be read"),
        ("model,device,batch_or_concurrency,input_len,metric,value\n", "no row can be predicted; line 1: no rows"),
        (
            "model,device,batch_or_concurrency,input_len,metric,value\nllama3-8b,Abacus 9,1,512,ttft,0.1\n",
            "no row can be predicted; line 2: device 'Abacus 9'",
        ),
    ],
)
def test_files_that_are_no_table_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    code, out, err = score(str(path))
    assert (code, out) == (2, "")
    assert message in err


@pytest.fixture(name="published", scope="module")
def published_rows() -> Iterator[list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCORE.parent))
        yield import_module("score_serving")._published()  # which reads them once: they take seconds


def test_batches_of_llama_bench_are_the_tokens_of_a_pass(published: list[Any]) -> None:
    """Its -b: throughput times latency is the tokens of one sequence, whatever it is."""
    rows = [row for row in published if row.engine.name == "llama.cpp"]
    assert len(rows) == 1299
    assert {row.traffic.sequences for row in rows} == {1.0}
    assert {row.options.chunk for row in rows} == {1.0, 16.0, 32.0, 64.0}


def test_two_dies_of_a_card_are_two_devices(published: list[Any]) -> None:
    """Llama 2 70B has 138 GB in 16 bits: it is not on two dies of 64 GiB, but on the four of two cards."""
    cards = [row for row in published if row.device.name == "MI250X-GCD"]
    large = {float(row.cut.tp) for row in cards if "2-70b" in row.model.lower() and row.engine.name == "vLLM"}
    assert large == {4.0, 8.0}
    assert {float(row.cut.pp) for row in cards if row.engine.name == "llama.cpp"} == {2.0, 4.0, 8.0}


def test_rows_of_requests_that_all_come_at_once_are_read_so(published: list[Any]) -> None:
    maximum = [row.traffic for row in published if "TensorRT-LLM v1" in row.cells[0] and row.replicas == 1]
    assert all(traffic.together for traffic in maximum)
    of = {(traffic.prompt, traffic.output): traffic.sequences for traffic in maximum}
    assert (of[2048, 2048], of[2048, 128], of[128, 128]) == (1500, 3000, 30000 / 8)  # at most 4,096 in a turn
    at_once = [row.traffic.first for row in published if "all requests at once" in row.cells[0]]
    assert at_once and set(at_once) == {1.0}


def test_command_lines_of_dstack_are_read_as_they_are(published: list[Any]) -> None:
    """--enforce-eager with AMD's devices alone, --max-model-len 91680, and a checkpoint "FP8-KV" in a 16-bit cache."""
    rows = [row for row in published if row.publisher == "dstackai"]
    assert {(row.device.name, row.options.eager) for row in rows} == {("MI300X", 1.0), ("H100-SXM", 0.0)}
    assert {(row.options.chunk, row.formats.cache_bytes) for row in rows} == {(91680, 2.0)}


def test_mxfp4_is_multiplied_in_8_bits_where_there_are_4_and_in_16_elsewhere(published: list[Any]) -> None:
    rows = [row for row in published if row.model.startswith("gpt-oss")]
    narrow = {row.device.name: bool(row.formats.narrow) for row in rows}
    assert narrow == {"B200": True, "GB200": True, "H100-SXM": False, "H200": False}
    of_b200 = {float(row.formats.flops_per_s) for row in rows if row.device.name == "B200"}
    assert of_b200 == {row.device.matmul_flops_per_s("fp8") for row in rows if row.device.name == "B200"}


def test_answers_of_one_length_fill_rounds(published: list[Any]) -> None:
    """400 requests of Vultr's, 256 at a time: a round of 256 and one of 144. Two rounds of 64 are 128 of vLLM's."""
    filled = {(row.publisher, float(row.traffic.sequences)): row.filled for row in published if row.filled}
    assert filled["docs.vultr", 256] == pytest.approx(400 / 512)
    assert filled["docs.vultr", 400] == filled["vllm-project/recipes", 64] == 1.0


def test_clients_of_their_own_wait_for_the_first(published: list[Any]) -> None:
    """lmdeploy's profile_generation.py: prompts of one token, 16 at a time, take two passes."""
    rows = [row for row in published if row.publisher == "lmdeploy" and row.metric == "ttft"]
    assert len(rows) == 80 and {row.apart for row in rows} == {1.0}
    alone, many = (next(row for row in rows if row.traffic.prompt == 1 and row.traffic.sequences == n) for n in (1, 16))
    table = import_module("serving_rows").ServingTable([alone, many])
    one, sixteen = table.predict(import_module("serving_fit").ServingConstants())
    assert 1.8 * one < sixteen < 2.1 * one


def test_trtllm_bench_has_attention_of_its_own_on_each_device_for_experts(published: list[Any]) -> None:
    """enable_attention_dp for models with experts: their tp of 8 deals experts to 8 devices, and cuts no attention."""
    rows = [row for row in published if "TensorRT-LLM v1.0" in row.cells[0] and row.devices == 8]
    of = {row.model: (float(row.cut.tp), float(row.cut.experts), row.replicas) for row in rows if row.cut.pp == 1}
    assert of["Qwen3-235B-A22B"] == of["Llama-4-Maverick-17B-128E"] == (1, 8, 8)
    assert of["Llama-3.1-405B"] == (8, 0, 1)


def test_mxfp4_on_hopper_keeps_its_cache_in_16_bits(published: list[Any]) -> None:
    rows = [row for row in published if row.model.startswith("gpt-oss") and row.engine.name == "TensorRT-LLM"]
    assert {(row.device.name, row.formats.cache_bytes) for row in rows} == {
        ("B200", 1.0), ("GB200", 1.0), ("H100-SXM", 2.0), ("H200", 2.0)
    }  # fmt: skip


def test_intervals_are_as_wide_as_the_errors_of_other_publishers(published: list[Any]) -> None:
    """Errors of a publisher tell how wide the intervals of others are, and nothing of its own."""
    scores = import_module("score_serving")
    of_metric = [row for row in published if row.metric == "ttft"]
    one, other, *_ = Counter(row.publisher for row in of_metric)
    table = scores.ServingTable([row for row in of_metric if row.publisher in (one, other)])
    is_one = table.publisher == one
    widths = scores.widths_of_others(table, np.where(is_one, 3.0, -1.0))
    assert widths[is_one] == pytest.approx(1.0 / scores.INTERVAL_Z)
    assert widths[~is_one] == pytest.approx(3.0 / scores.INTERVAL_Z)
    alone = scores.widths_of_others(table.take(is_one), np.full(is_one.sum(), 3.0))
    assert set(alone) == {scores.NARROWEST}  # nobody else says anything
