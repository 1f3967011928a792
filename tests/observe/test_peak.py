"""The matmul rate that MFU is measured against."""

from __future__ import annotations

import time

import pytest
import torch

from argosy.observe import peak as measured
from argosy.observe.peak import matmul_peak_flops

CPU, SIZE = torch.device("cpu"), 1024


@pytest.fixture(autouse=True)
def _as_large_as_in_a_run(monkeypatch):
    monkeypatch.setitem(measured.SIZE, "cpu", SIZE)


def test_the_peak_is_repeatable():
    first, second = (matmul_peak_flops(CPU, torch.float32) for _ in range(2))
    assert 1 / 3 < first / second < 3  # other tests and other people use this machine


def test_no_matmul_of_that_size_is_faster_than_the_peak():
    peak = matmul_peak_flops(CPU, torch.float32)
    a = torch.randn(SIZE, SIZE)
    began = time.perf_counter()
    for _ in range(4):
        a @ a
    assert 4 * 2 * SIZE**3 / (time.perf_counter() - began) < 1.5 * peak


def test_a_number_format_without_fast_matmuls_is_not_measured_for_long(monkeypatch):
    calls = []
    monkeypatch.setattr(measured, "_seconds", lambda a, b: calls.append(0) or 0.6)
    assert matmul_peak_flops(CPU, torch.float16) == pytest.approx(2 * SIZE**3 / 0.6)
    assert len(calls) == 2
