"""The matmul rate that MFU is measured against."""

from __future__ import annotations

import time

import torch

from argosy.observe.peak import matmul_peak_flops

CPU = torch.device("cpu")


def test_the_peak_is_repeatable():
    first, second = (matmul_peak_flops(CPU, torch.float32) for _ in range(2))
    assert 1 / 3 < first / second < 3  # other tests and other people use this machine


def test_no_matmul_of_that_size_is_faster_than_the_peak():
    peak = matmul_peak_flops(CPU, torch.float32)
    a = torch.randn(1024, 1024)
    began = time.perf_counter()
    for _ in range(4):
        a @ a
    assert 4 * 2 * 1024**3 / (time.perf_counter() - began) < 1.5 * peak
