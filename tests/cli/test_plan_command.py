"""`argosy plan`, as a user runs it: the usages of its help, JSON, the page, and input that makes no sense."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from argosy import cli
from argosy.config.data import PrepareConfig
from argosy.data.prepare import prepare
from argosy.plan.plan import Plan

SMALL = ["--model", "llama3-8b", "--cluster", "8xh100", "--global-batch", "64", "--seq-len", "8192"]
SERVED = ["--model", "llama3-8b", "--cluster", "8xh100", "--serve"]
RUN_FILE = """
name = "mine"
plan = "{plan}"
[model]
layers = 4
width = 256
heads = 4
kv_heads = 4
head_width = 64
ffn_width = 704
vocab_size = 4096
[data]
seq_len = 512
sources = {{ "corpus" = 1.0 }}
[train]
steps = 50
global_batch = 16
[launch]
device = "cpu"
"""


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]):
    """What `argosy plan WORDS ...` prints; it must succeed."""

    def run(*words: str) -> str:
        assert cli.main(["plan", *words]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def run_file(tmp_path: Path):
    """A run file with this plan."""

    def write(plan: str) -> str:
        path = tmp_path / "run.toml"
        path.write_text(RUN_FILE.format(plan=plan))
        return str(path)

    return write


def test_a_model_on_a_cluster_is_ranked_and_explained(ask: Any) -> None:
    said = ask(*SMALL)
    for words in (
        "llama3-8b (8.03B parameters) on 8 H100-SXM; a step is 64 sequences of 8192 tokens",
        "plans looked at",
        "the best by step time",
        "Where a step's time goes",
        "Memory of the rank that needs most",
        "The step time depends most on",
        "save every",
        "hold 0 spare nodes, if a repair takes 24 h",
    ):
        assert words in said


def test_json_is_complete_and_its_plans_can_be_pasted(ask: Any) -> None:
    said = json.loads(ask(*SMALL, "--json", "--top", "3"))
    assert len(said["choices"]) == 3
    best = said["choices"][0]
    assert best == said["explanation"]["choice"]
    assert Plan.parse(best["plan"]).world_size == best["devices"] == 8
    assert best["step_s"]["low"] < best["step_s"]["mid"] < best["step_s"]["high"]
    steps = [choice["step_s"]["mid"] for choice in said["choices"]]
    assert steps == sorted(steps)
    waterfall = said["explanation"]["waterfall"]
    undisturbed_s = best["step_s"]["mid"] + waterfall["evaluations"]
    lost = said["explanation"]["failures"]["overhead"]["mid"]
    assert sum(waterfall.values()) == pytest.approx(undisturbed_s * (1 + lost))
    assert sum(said["explanation"]["memory"].values()) == pytest.approx(best["memory_bytes"]["mid"])
    assert best["run"]["money"]["mid"] > 0 and best["run"]["energy_kwh"]["mid"] > 0
    assert said["tokens"] == pytest.approx(20 * said["active_parameters"])


def test_what_is_fixed_stays(ask: Any) -> None:
    said = json.loads(ask(*SMALL, "--fix", "tp=2|4,recompute=selective", "--json"))
    plans = [Plan.parse(choice["plan"]) for choice in (*said["choices"], *said["pareto"])]
    assert {plan.tp for plan in plans} <= {2, 4}
    assert {plan.recompute for plan in plans} == {"selective"}


def test_devices_without_bf16_get_plans_in_fp16(ask: Any) -> None:
    said = json.loads(ask("--model", "qwen3-0.6b", "--cluster", "8xt4", "--seq-len", "2048", "--json"))
    assert {Plan.parse(choice["plan"]).precision for choice in said["choices"]} == {"fp16"}


@pytest.mark.parametrize("objective", ["time", "cost", "energy", "goodput"])
def test_the_objective_decides_the_order(ask: Any, objective: str) -> None:
    words = ["--model", "llama3-8b", "--cluster", "16xh100", "--global-batch", "128", "--objective", objective]
    said = json.loads(ask(*words, "--tokens", "1e12", "--json"))
    figure = {
        "time": lambda c: c["step_s"]["mid"],
        "cost": lambda c: c["run"]["money"]["mid"],
        "energy": lambda c: c["run"]["energy_kwh"]["mid"],
        "goodput": lambda c: -c["run"]["tokens_per_day"]["mid"],
    }[objective]
    figures = [figure(choice) for choice in said["choices"]]
    assert figures == sorted(figures)
    devices = {choice["devices"] for choice in said["choices"]}
    assert (devices == {16}) == (objective in ("time", "goodput"))


def test_what_is_not_said_is_assumed_aloud(ask: Any) -> None:
    said = ask("--model", "llama3-8b", "--cluster", "8xh100")
    assert "Assumed: --seq-len 8192" in said and "Assumed: --global-batch" in said


@pytest.fixture
def bf16_is(monkeypatch: pytest.MonkeyPatch):
    """Let this machine's bf16 matmuls be fast, or slow."""
    return lambda fast: monkeypatch.setattr("argosy.launch.devices.bf16_is_fast", lambda: fast)


def test_a_run_file_is_planned_for_this_machine_as_the_trainer_would(ask: Any, run_file: Any, bf16_is: Any) -> None:
    bf16_is(False)
    said = json.loads(ask(run_file("dp_replicate=2,microbatch=4"), "--json"))
    assert said["devices"] == 2
    assert said["explanation"]["choice"]["plan"] == "dp_replicate=2,microbatch=4,precision=fp32"
    assert said["tokens"] == 50 * 16 * 512
    elsewhere = json.loads(ask(run_file("auto"), "--cluster", "8xh100", "--json"))
    assert elsewhere["devices"] == 8
    assert elsewhere["explanation"]["choice"] == elsewhere["choices"][0]
    bf16_is(True)
    fast = json.loads(ask(run_file("auto"), "--json"))
    assert {Plan.parse(choice["plan"]).precision for choice in (*fast["choices"], *fast["pareto"])} == {"bf16"}
    assert "precision=bf16" in fast["explanation"]["choice"]["plan"]


def test_the_vocabulary_is_that_of_the_prepared_data(ask: Any, run_file: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Some words, and some more of them. " * 500)
    config = PrepareConfig(input=(str(tmp_path / "text.txt"),), out=tmp_path / "data", vocab_size=300)
    vocab_size = prepare(config, lambda _: None).vocab_size
    assert vocab_size < 4096
    path = Path(run_file("auto"))
    text = path.read_text().replace("vocab_size = 4096\n", "").replace('"corpus"', '"data"')
    path.write_text(text)
    known = json.loads(ask(str(path), "--cluster", "2xh100", "--json"))
    assert known["assumed"] == []
    path.write_text(text.replace("width = 256", f"width = 256\nvocab_size = {vocab_size}"))
    assert json.loads(ask(str(path), "--cluster", "2xh100", "--json"))["parameters"] == known["parameters"]


def test_several_clusters_stand_side_by_side_with_their_prices(ask: Any) -> None:
    clusters = ["--cluster", "8xh100", "--cluster", "16xa100", "--cluster", "1xh100"]
    words = ["--model", "llama3-8b", "--global-batch", "64", *clusters]
    said = ask(*words, "--price", "2", "--price", "1.5", "--price", "3")
    rows = {line.split()[0]: line.split() for line in said.splitlines() if re.match(r"\d+x\w+ ", line)}
    assert rows["8xh100"][1] == "8" and rows["16xa100"][1] == "16"
    assert "16.0" in rows["8xh100"] and "24.0" in rows["16xa100"]
    assert re.search('^8xh100: "pp=|^8xh100: "\\w+=', said, re.M) and "1xh100: nothing fits" in said
    found = list(map(json.loads, ask(*words, "--price", "2", "--json").splitlines()))
    assert [one["named"] for one in found] == ["8xh100", "16xa100", "1xh100"]
    assert found[0]["report"]["price_per_device_h"]["mid"] == 2 and found[2]["report"] is None


def test_the_side_by_side_ends_in_what_to_take(ask: Any) -> None:
    two = ("--cluster", "8xh100", "--cluster", "64xh100")
    words = ask("--model", "llama3-8b", *two, "--price", "2", "--fix", "cp=1,schedule=1f1b")
    assert "Take 8xh100 if cost counts" in words and "take 64xh100 if time counts" in words


def test_the_fewest_devices_that_are_in_time_on_each_cluster(ask: Any) -> None:
    few = ("--fix", "tp=1|8,cp=1")  # plans to look at
    asked = ("--model", "llama3-8b", "--tokens", "100B", "--global-batch", "512", "--within", "2w", *few)
    words = ask(*asked, "--cluster", "h100", "--cluster", "8xt4", "--price", "2")
    assert "llama3-8b, 100B tokens, within 14.0 days" in words
    assert re.search(r"h100: \d+ devices do it in 14.0 days", words)
    assert re.search(r"Take \d+ devices of h100: it costs least, the only one that does it", words)
    found = json.loads(ask(*asked, "--cluster", "32xh100", "--json"))
    assert found["fewest"]["run"]["time_s"]["mid"] <= 14 * 86400 < found["sizes"][0]["run"]["time_s"]["mid"]
    assert Plan.parse(found["fewest"]["plan"]).world_size == found["fewest"]["devices"]


def test_the_price_of_an_hour_is_said(ask: Any) -> None:
    few = ("--fix", "tp=8")  # plans to look at
    said = ask(*SMALL, *few)
    assert "USD an hour of a device, prices of" in said and "--price sets yours" in said
    mine = ask(*SMALL, *few, "--price", "2.5")
    assert "at 2.5 USD an hour of a device" in mine and "prices of" not in mine


@pytest.mark.parametrize("named", ["{}", "{}/", "{}/config.json"])
def test_a_model_can_be_a_hugging_face_folder(ask: Any, tmp_path: Path, named: str) -> None:
    folder = tmp_path / "My-Llama-0.6B"
    folder.mkdir()
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4, "intermediate_size": 1024}
    described = {"model_type": "llama", "vocab_size": 32_000, "max_position_embeddings": 4096, **sizes}
    (folder / "config.json").write_text(json.dumps(described))
    said = json.loads(ask("--model", named.format(folder), "--cluster", "2xh100", "--json"))
    assert (said["model"], said["seq_len"]) == ("My-Llama-0.6B", 4096)
    assert said["parameters"] == 2 * 32_000 * 512 + 4 * (4 * 512 * 512 + 3 * 512 * 1024 + 2 * 512) + 512


def test_changed_sizes_of_a_preset_are_told(ask: Any, run_file: Any) -> None:
    path = Path(run_file("auto"))
    path.write_text(path.read_text().replace("[model]", '[model]\npreset = "llama-5m"'))
    assert ask(str(path), "--cluster", "2xh100").startswith("llama-5m with other sizes (")


def test_numbers_that_a_run_s_plan_fixes_stay(ask: Any, run_file: Any) -> None:
    said = json.loads(ask(run_file("auto,precision=fp32"), "--cluster", "8xh100", "--json"))
    assert {Plan.parse(choice["plan"]).precision for choice in said["choices"]} == {"fp32"}


def test_devices_of_several_kinds_get_plans_with_uneven_shares(ask: Any) -> None:
    said = ask("--model", "llama3-8b", "--cluster", "8xh100+8xa100", "--global-batch", "128")
    assert "All plans wait for the slowest device, A100-80" in said
    assert "Work dealt out by the speed of devices" in said
    assert re.search(r"(shares|layers)=\d+:\d+", said)
    dealt = r"(replicas|pipeline ranks) on H100-SXM: \d+ (microbatches|layers) each; \d+ \1 on A100-80"
    assert re.search(dealt, " ".join(said.split()))  # however the lines are broken


def test_sites_that_sum_in_every_step_are_compared_with_rounds(ask: Any) -> None:
    words = ["--model", "llama3-8b", "--cluster", "two-sites", "--global-batch", "128"]
    said = json.loads(ask(*words, "--fix", "cp=1,schedule=1f1b", "--json"))
    assert [way["inner_steps"] for way in said["exchanges"]] == [1, 10, 50, 100, 500]
    assert said["exchanges"][0]["step_s"] == pytest.approx(said["choices"][0]["step_s"]["mid"], rel=0.03)
    assert [Plan.parse(way["plan"]).world_size for way in said["exchanges"]] == [128, 64, 64, 64, 64]
    assert {Plan.parse(way["plan"]).sync for way in said["exchanges"][1:]} == {"diloco"}
    assert said["exchanges"][2]["sync"] == {"every_steps": 50, "wire": "fp32"}
    assert Plan.parse(said["choices"][0]["plan"]).world_size == 128
    assert "Sites that sum gradients in every step (H = 1), or agree every H steps" in ask(*words, "--fix", "tp=8")
    pinned = json.loads(ask(*words, "--fix", "dp_replicate=2,tp=8", "--json"))
    assert {Plan.parse(choice["plan"]).dp_replicate for choice in pinned["choices"]} == {2}


def test_the_page_stands_alone_and_is_well_formed(ask: Any, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    ask("--model", "llama3-8b", "--cluster", "8xh100+8xa100", "--global-batch", "128", "--html", str(page))
    text = page.read_text()
    assert not re.search(r"(?:src|href)=|url\(|https?://|@import|<script", text)
    assert "prefers-color-scheme: dark" in text
    charts = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(charts) == 4
    for chart in charts:
        for mark in ElementTree.fromstring(chart).iter():
            assert float(mark.get("width", 1)) > 0 and "nan" not in str(mark.attrib)


def test_serving(ask: Any) -> None:
    words = ["--model", "llama3-70b", "--cluster", "8xh100", "--serve"]
    assert "first token" in ask(*words)
    said = json.loads(ask(*words, "--weights", "bf16|fp8", "--rate", "2", "--tpot-ms", "50", "--json"))
    assert {choice["weights"] for choice in said["curve"]} == {"bf16", "fp8"}
    assert all(choice["replicas"] * choice["tp"] * choice["pp"] <= 8 for choice in said["choices"])
    assert said["sized"][0]["devices"] <= 8
    few = json.loads(ask(*words, "--global-batch", "16", "--draft", "3:0.7", "--json"))
    assert all(choice["replicas"] * choice["sequences"] >= 16 for choice in few["curve"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say either a run file or --model NAME"),
        (["--model", "llama3-8b"], "--model llama3-8b needs --cluster"),
        (["--model", "llama3-9b", "--cluster", "8xh100"], "did you mean llama3-8b"),
        (["--model", "llama3-8b", "--cluster", "8xh1000"], "did you mean h100"),
        (["--model", "llama3-8b", "--cluster", "none.toml"], "none.toml: cannot be read"),
        (["none.toml"], "none.toml: no such run file"),
        ([*SMALL, "--fix", "tp=2,tp=4"], '--fix "tp=2,tp=4": tp is given twice'),
        ([*SMALL, "--lora-base", "nf4"], '--lora-base = "nf4" with --lora = 0'),
        ([*SMALL, "--fix", "tp=2,pp=8"], "pp=8 x tp=2 takes 16 devices at a time, which does not divide 8"),
        ([*SMALL, "--fix", "schedule=zbv,compile=true"], "Add compile=false"),
        (["--model", "llama3-8b", "--cluster", "8xt4", "--fix", "precision=bf16"], "T4 has no bf16 matmuls. Try prec"),
        ([*SMALL[:3], "8xa100", "--fix", "precision=bf16|fp8"], "8.9 or more (Ada, Hopper, Blackwell), or AMD's"),
        (
            [*SMALL[:3], "8xa100", "--fix", "precision=fp8_rowwise"],
            "A100-80 (compute capability 8.0). Try precision=bf16",
        ),
        (
            [*SMALL[:3], "8xh100", "--fix", "precision=mxfp8"],
            "H100-SXM (compute capability 9.0). Try precision=fp8_rowwise",
        ),
        (
            ["--model", "qwen3-30b-a3b", "--cluster", "8xb200", "--fix", "precision=fp8_rowwise"],
            "B200 (compute capability 10.0). Try precision=bf16",
        ),
        ([*SMALL, "--tokens", "-1"], "--tokens -1: must be above 0"),
        ([*SMALL, "--tokens", "nan"], "--tokens nan: must be above 0"),
        ([*SMALL, "--top", "0"], "--top 0: must be above 0"),
        ([*SMALL[:-1], "100000"], "--seq-len 100000 is more than the model's longest sequence, 8192"),
        (["demo", "--cluster", "8xh100", "--seq-len", "1M"], "--seq-len = 1000000 is more than model.max_seq_len"),
        ([*SMALL, "--fix", "tp=2.5"], '--fix tp = "2.5": must be a whole number above 0'),
        ([*SMALL, "--cluster", "8xa100", "--html", "x.html"], "--html takes one --cluster"),
        ([*SMALL, "--cluster", "8xa100", "--serve"], "--seq-len is for training"),
        ([*SMALL, "--price", "2", "--price", "3"], "2 --price for 1 --cluster"),
        ([*SMALL, "--price", "0"], "--price 0: must be above 0"),
        ([*SMALL, "--within", "30", "days"], "--within '30' is no length of time; try 90m, 12h, 30d or 2w"),
        ([*SMALL, "--within", "30d", "--serve"], "Leave out --serve"),
        ([*SMALL, "--within", "30d", "--objective", "cost"], "in time. Leave out --objective"),
        (["--model", "llama3-70b", "--cluster", "1xt4", "--within", "30d"], "nothing fits"),
        ([*SMALL, "--finetune", "1M", "--tokens", "1M"], "Leave out --finetune"),
        (["--model", "no/such", "--cluster", "8xh100"], "no/such/config.json is not there. Give a Hugging Face folder"),
        (["--model", "llama3-70b", "--cluster", "8xh100", "--cluster", "2xa100"], "2xa100: nothing fits"),
        ([*SMALL, "--html", "/dev/null/plan.html"], "--html /dev/null/plan.html: cannot be written"),
        ([*SMALL, "--html", "/tmp"], "--html /tmp: cannot be written"),
        ([*SERVED, "--html", "x.html"], "--serve plans serving, not training. Leave out --html"),
        ([*SERVED, "--tokens", "1B"], "Leave out --tokens"),
        ([*SERVED, "--objective", "cost"], "Leave out --objective"),
        ([*SERVED, "--cluster", "8xa100"], "--serve takes one --cluster"),
        ([*SERVED, "--tpot-ms", "20"], "limits at a rate of requests. Add --rate"),
        ([*SERVED, "--rate", "nan"], "--rate nan: must be above 0"),
        ([*SERVED, "--draft", "3:2"], "--draft 3:2: is not TOKENS:ACCEPTED"),
        ([*SERVED, "--draft", "1025:0.5"], "--draft 1025:0.5: is not TOKENS:ACCEPTED[:COST] of 1 to 1024 TOKENS"),
        ([*SERVED, "--kv-cache", "|"], "--kv-cache |: not known. Try 16, fp8."),
        ([*SERVED, "--kv-cache", ""], "--kv-cache names no format. Try 16, fp8."),
        ([*SERVED, "--weights", "|"], "--weights |: not known. Try fp32, "),
        ([*SERVED, "--rate", "1", "--tpot-ms", "0.1"], "nothing answers 95 of 100 requests within 0.10 ms between"),
        ([*SERVED, "--prompt-len", "1M"], "--prompt-len and --output-len: 1000512 tokens together are more than"),
        (["demo", "--cluster", "8xh100", "--serve", "--prompt-len", "9k"], "--prompt-len and --output-len: 9512 "),
        ([*SMALL, "--rate", "3"], "--rate says something about serving. Add --serve"),
        ([*SMALL, "--kv-cache", "fp8"], "--kv-cache says something about serving. Add --serve"),
        (["--learn", "rows.csv", "--cluster", "none.toml"], "none.toml is not one"),
        (["--learn", "rows.csv", "--tokens", "1T"], "--learn only corrects a cluster's file. Leave out --tokens"),
    ],
)
def test_input_that_makes_no_sense_is_one_message(words: list[str], message: str, capsys: Any) -> None:
    assert cli.main(["plan", *words]) == 2
    out, err = capsys.readouterr()
    assert message in err and out == ""


@pytest.mark.parametrize("words", [("--fix", "tp=2"), ("--serve",), ("--html", "x.html"), ("--top", "3")])
def test_options_that_say_nothing_about_a_run_under_way_are_refused(
    words: tuple[str, ...], tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "run.toml").touch()
    assert cli.main(["plan", str(tmp_path), *words]) == 2
    said = f"{tmp_path} is a run under way, whose other keys are as they were. Leave out {words[0]}."
    assert said in capsys.readouterr().err


def test_where_nothing_fits_it_says_by_how_much_and_what_would_do(capsys: Any) -> None:
    assert cli.main(["plan", "--model", "llama3-70b", "--cluster", "8xh100", "--global-batch", "64"]) == 2
    said = capsys.readouterr().err
    needs = re.search(r'the leanest, "([^"]+)", needs ([\d.]+) GiB of each device, ([\d.]+) GiB more than', said)
    assert needs and Plan.parse(needs[1]).world_size == 8
    assert "optimizer takes" in said
    larger = re.search(r'On (\d+) such devices: "([^"]+)"', said)
    assert larger and Plan.parse(larger[2]).world_size == int(larger[1]) > 8


def test_what_would_do_does(capsys: Any) -> None:
    """The cluster that the message names is large enough, and half of it is not."""
    words = ["plan", "--model", "llama3-70b", "--global-batch", "64", "--cluster"]
    assert cli.main([*words, "8xh100"]) == 2
    count = int(re.search(r"On (\d+) such devices", capsys.readouterr().err)[1])  # type: ignore[index]
    assert cli.main([*words, f"{count}xh100"]) == 0
    assert cli.main([*words, f"{count // 2}xh100"]) == 2


def test_pins_that_do_not_fit_get_the_nearest_plan_that_does(capsys: Any) -> None:
    assert cli.main(["plan", *SMALL, "--fix", "dp_replicate=8"]) == 2
    near = re.search(r'With nothing fixed, the nearest that fits: "([^"]+)"', capsys.readouterr().err)
    assert near
    assert cli.main(["plan", *SMALL, "--fix", near[1]]) == 0


def test_a_run_that_does_not_fit_is_explained_with_the_nearest_that_does(
    ask: Any, run_file: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.launch.devices.host_memory_bytes", lambda: 2.0**31)
    path = Path(run_file("microbatch=16,dp_replicate=1"))
    path.write_text(path.read_text().replace("seq_len = 512", "seq_len = 8192"))
    said = json.loads(ask(str(path), "--json"))
    missing = said["explanation"]["misfit"]
    assert missing["needs_bytes"] > missing["has_bytes"] and missing["largest"] == "activations"
    near = Plan.parse(said["explanation"]["near"]["plan"])
    assert near.world_size == 1 and said["explanation"]["near"]["fits"]


def test_it_does_not_import_torch() -> None:
    words = ["plan", *SMALL]
    code = f"import sys; from argosy import cli; assert cli.main({words}) == 0; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
