"""The findings of a space told to people and programs: fronts, products with what binds them, what was left out."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from pytest import approx
from tests.plan.design.conftest import SERVE, Load

from argosy.plan.design.points import BYTES
from argosy.plan.design.report import as_csv, as_record, design_report, in_words, pictures

SPEEDUP = '\n[speedup]\nbefore = "a100"\nafter = "h100"\n'
HALF = SERVE.replace("tp = [1, 2]", 'tp = [1]\nweights = ["bf16"]').replace("[1, 16]", "[16]")
"""One way to serve: 16 bytes for each of 8B numbers."""


def test_products_take_the_longer_of_arithmetic_and_memory(load: Load) -> None:
    report = design_report(load(HALF, memory_bytes_per_s="[2e12, 8e12]"))
    points, bounds = report.points, {row: {(b.work, b.name): b for b in some} for row, some in report.bounds.items()}
    assert bounds.keys() == {0, 1} and {work for work, _ in bounds[0]} == {"prefill", "decode"}
    for row, found in bounds.items():
        for one in found.values():
            flops = (
                one.times * 2 * one.m * one.k * one.n / (points.flops_per_s["bf16"][row] * points.achieved["bf16"][row])
            )
            if one.is_weight:
                assert one.compute_s == approx(flops)
                moved = one.times * (one.m * one.k + one.k * one.n + one.m * one.n) * BYTES["bf16"]
                assert one.memory_s == approx(moved / points.memory_bytes_per_s[row])
            assert one.binds == ("compute" if one.compute_s >= one.memory_s else "memory")
    names = {name for work, name in bounds[0] if work == "decode"}
    assert all(bounds[0]["decode", n].memory_s == approx(4 * bounds[1]["decode", n].memory_s) for n in names)


def test_attention_sees_no_more_than_its_windows(load: Load) -> None:
    (some,) = design_report(load(HALF.replace("llama3-8b", "gemma3-1b"))).bounds.values()  # 22 of 26 have 512 tokens
    seen = {one.work: one.n for one in some if one.name == "attention scores"}
    assert 512 < seen["decode"] < 1024 and 256 < seen["prefill"] < 600


def test_every_point_is_a_line_with_a_letter_for_each_product(load: Load) -> None:
    report = design_report(load(HALF, memory_bytes_per_s="[2e12, 8e12]"))
    rows = list(csv.DictReader(io.StringIO(as_csv(report))))
    assert [float(row["memory_bytes_per_s"]) for row in rows] == [2e12, 8e12]
    for number, row in enumerate(rows):
        assert report.served is not None
        assert float(row["tpot_s"]) == report.served.tpot_s[number]
        assert (row["weights"], row["tp"], row["sequences"]) == ("bf16", "1", "16")
        for work in ("prefill", "decode"):
            binds = "".join(b.binds[0].upper() for b in report.bounds[number] if b.work == work)
            assert row[f"{work}_binds"] == binds


def test_a_device_that_the_model_does_not_fit_is_counted_and_has_no_figures(load: Load) -> None:
    report = design_report(load(HALF, memory_bytes="[10e9, 80e9]"))
    record = as_record(report)
    assert (record.points, record.combinations, record.fits_none) == (2, 2, {"training": 0, "serving": 1})
    assert (record.searched, record.regret) == (0, None)  # nothing is trained
    (front,) = record.fronts["serving"]
    assert front["memory_bytes"] > 16e9 and front["tp"] == 1  # 8B numbers of two bytes
    assert "  memory_bytes         1e+10 -  8e+10 1.00" in in_words(report).splitlines()
    first, second = csv.DictReader(io.StringIO(as_csv(report)))
    assert (first["tpot_s"], first["decode_binds"]) == ("", "") and float(second["tpot_s"]) > 0


def test_combinations_that_are_no_device_are_counted_by_their_reason(load: Load) -> None:
    report = design_report(load(HALF, node='"N5"', memory='["HBM3", "HBM4"]', stacks="12", power_w="[400]"))
    record = as_record(report)
    (reason,) = record.left_out
    assert (record.points, record.combinations, record.left_out[reason]) == (1, 2, 1)
    assert f"1 combination was left out: {reason}." in record.notes
    assert record.notes[0].startswith("No run has checked these figures") and any(
        n.startswith("N5: ") for n in record.notes
    )


def test_the_report_says_what_was_swept_the_best_and_how_it_depends_on_each_figure(load: Load) -> None:
    report = design_report(load(HALF + SPEEDUP, memory_bytes_per_s="[2e12, 4e12]"))
    lines = in_words(report, top=1).splitlines()
    assert lines[0].startswith("design: 2 devices from H100-SXM on, in ")
    best = next(n for n, line in enumerate(lines) if line.startswith("serving: "))
    assert (
        lines[best] == f"serving: {len(report.fronts['serving'])} that no other beats in time, money and energy at once"
    )
    assert lines[best + 1].endswith("memory_bytes_per_s 4e+12; tp=1, 16 at a time") and lines[best + 2] == ""
    assert "serving along memory_bytes_per_s, all else as in the base or the middle:" in lines
    (title,) = (line for line in lines if line.startswith("serving, A100"))
    assert title.endswith(f"{report.speedups[0].whole:.1f}x")
    assert lines[-1] == report.caveats[-1]


def test_charts_are_drawn_of_what_has_several_points(load: Load) -> None:
    report = design_report(load(HALF + SPEEDUP, memory_bytes_per_s="[2e12, 4e12]"))
    found = pictures(report)
    assert {"design-serving-memory_bytes_per_s.svg", "design-serving-memory_bytes_per_s-binds.svg"} <= set(found)
    assert "design-serving-speedup.svg" in found
    for drawn in found.values():
        assert ElementTree.fromstring(drawn).tag.endswith("svg")
    named = replace(report, space=report.space.model_copy(update={"name": "../mine, or not"}))
    assert set(pictures(named)) == {name.replace("design", "mine-or-not") for name in found}
    assert set(pictures(design_report(load(HALF)))) == set()


@pytest.mark.parametrize("top", [1, 3])
def test_the_front_is_told_at_most_so_often(load: Load, top: int) -> None:
    figures = {"memory_bytes_per_s": "[2e12, 3e12, 4e12, 5e12]", "price_usd_per_h": "[1, 2, 3, 4]"}
    report = design_report(load(HALF, **figures))
    told = [line for line in in_words(report, top).splitlines() if line.endswith("at a time")]
    assert len(told) == min(top, len(report.fronts["serving"]))
