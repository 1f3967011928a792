"""`argosy probe`: what is refused, what a dry run would do, and a cluster in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from argosy import cli
from argosy.cli.probe import cluster_in_words
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.measurements import AttentionRate, CollectiveRate, Measurements

SITES = '[[sites]]\nname = "oslo"\naddress = "127.0.0.1:1"\n[[sites]]\nname = "bergen"\naddress = "127.0.0.1:2"\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('name = "demo"\n')
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--site oslo", "--site oslo is a site of a run: name its run file with --run."),
        ("--run run.toml --site oslo --processes 2", "--site measures links only. Leave out --processes and --device."),
        ("--run run.toml --site oslo --device h100", "--site measures links only. Leave out --processes and --device."),
        ("--run run.toml --model llama3-8b", "--model and --run both name a model: give one of them."),
        ("--minutes 0", "--minutes must be above 0 and --processes at least 0. Try --minutes 5."),
        ("--processes -1", "--minutes must be above 0 and --processes at least 0. Try --minutes 5."),
        ("--out none/cluster.toml", "--out none/cluster.toml: there is no folder {here}/none."),
        ("--out .", "--out .: no file can be written there. Name one, such as ./cluster.toml."),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_remedy(words, message, here, capsys):
    assert cli.main(["probe", *words.split()]) == 2
    assert capsys.readouterr().err == f"argosy: {message.format(here=here)}\n"
    assert [path.name for path in here.iterdir()] == ["run.toml"]


@pytest.mark.parametrize(
    ("words", "would"),
    [
        ("--model llama3-8b", ["start a process a device, and measure for about 5 minutes the shapes of llama3-8b",
                               "write cluster.toml"]),
        ("--run run.toml --processes 1 --minutes 0.5 --out mine.toml",
         ["start 1 process, and measure for about 0.5 minutes the shapes of llama", "write mine.toml"]),
        ("--model llama3-8b --processes 4",
         ["start 4 processes, and measure for about 5 minutes the shapes of llama3-8b", "write cluster.toml"]),
    ],
)  # fmt: skip
def test_a_dry_run_says_what_would_be_measured_and_writes_nothing(words, would, here, capsys):
    assert cli.main(["probe", "--dry-run", *words.split()]) == 0
    assert capsys.readouterr().out.splitlines() == [f"would {line}" for line in would]
    assert [path.name for path in here.iterdir()] == ["run.toml"]


def rate(operation: Any, ranks: int, latency_s: float, bytes_per_s: float | None) -> CollectiveRate:
    return CollectiveRate(
        operation=operation, tier="node", ranks=ranks, groups=8 // ranks, from_bytes=1024, latency_s=latency_s,
        bytes_per_s=bytes_per_s,
    )  # fmt: skip


def test_a_cluster_is_told_with_what_was_measured():
    attention = AttentionRate(
        seq_len=512, heads=4, head_width=64, number_format="bf16", forward_flops_per_s=2e11, backward_flops_per_s=1e11
    )
    measured = Measurements(
        date="2026-11-21", memory_copy_bytes_per_s=5e9, disk_write_bytes_per_s=3.005e8, disk_read_bytes_per_s=2e9,
        attention=(attention,), launch_s=4.2e-6, layer_host_s=1.5e-4, loader_tokens_per_s=2.5e6,
        collectives=(rate("all_reduce", 4, 2e-5, 3e9), rate("send", 2, 3e-4, None)),
    )  # fmt: skip
    lines = cluster_in_words(
        Cluster.parse("8xh100").model_copy(update={"name": "mine", "software": "torch 2.13", "measured": measured})
    ).splitlines()
    assert lines[0] == "mine   torch 2.13"
    assert lines[1].startswith("  matmuls    ") and "bf16 " in lines[1] and "GFLOP/s" in lines[1]
    assert lines[2:] == [
        "  attention  bf16 200 GFLOP/s",
        "  memory     5.00 GB/s, 85.9 GB a device",
        "  host       4.2 us an operation, 0.15 ms a layer",
        "  disk       write 0.30 GB/s, read 2.00 GB/s",
        "  loader     2.5M tokens/s",
        "  all_reduce     2 x 4 in the node     from      1024 B        20 us + 3.00 GB/s",
        "  send           4 x 2 in the node     from      1024 B       300 us",
    ]
