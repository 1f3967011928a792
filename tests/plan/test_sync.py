"""The bytes of rounds follow from the run file."""

from __future__ import annotations

import math

import pytest

from argosy.config.sync import OuterConfig, SyncConfig
from argosy.plan.sync import Summand, fragments_of, is_summed_exactly, rounds_in, sent_in_run, sent_in_turn, thin_rank

SHAPES = {"embedding.weight": (256, 8), **{f"blocks.{i}.w": (256, 4) for i in range(4)}, "norm.weight": (8,)}


def test_fragments_have_early_and_late_layers() -> None:
    assert fragments_of(SHAPES, 2) == [
        ["blocks.0.w", "blocks.2.w", "norm.weight"],
        ["embedding.weight", "blocks.1.w", "blocks.3.w"],
    ]


def test_a_round_sends_one_fragment_and_the_last_everything() -> None:
    one = OuterConfig(every_steps=10, wire="int4")
    assert sent_in_turn(SHAPES, one, 2) == [25 * 132]  # 24 blocks of 256 numbers, and the 8 of the norm
    two = OuterConfig(every_steps=10, fragments=2, wire="int4")
    assert sent_in_turn(SHAPES, two, 2) == [9 * 132, 16 * 132]
    assert sent_in_turn(SHAPES, two, 3) == [4 / 3 * 9 * 132, 4 / 3 * 16 * 132]
    assert sent_in_run(SHAPES, two, 2, 20) == (9 + 16 + 9 + 25) * 132
    assert sent_in_run(SHAPES, two, 2, 5) == 25 * 132


def test_before_they_train_alone_sites_send_all_gradients_in_each_step():
    later = OuterConfig(every_steps=10, fragments=2, wire="int4", from_step=3)
    assert sent_in_run(SHAPES, later, 2, 13) == 3 * 25 * 1024 + (9 + 25) * 132
    assert sent_in_run(SHAPES, later, 2, 2) == 2 * 25 * 1024


@pytest.mark.parametrize(("shape", "matrices"), [((6, 4), (1, 6, 4)), ((3, 6, 4, 2), (3, 6, 8))])
def test_stacks_of_experts_are_a_matrix_each(shape, matrices):
    assert Summand(False, shape, 0).matrices == matrices
    assert Summand(False, shape, 0).elements == math.prod(shape)


@pytest.mark.parametrize(("shape", "parts", "largest"), [((7, 4), 2, (4, 4)), ((3, 7, 4), 2, (3, 4, 4))])
def test_the_largest_part_of_what_is_cut(shape, parts, largest):
    assert Summand(False, shape, 0).part(parts).shape == largest


def test_a_matrix_is_thinned_only_where_that_halves_it():
    assert thin_rank(64, 64, 8) == 8
    assert thin_rank(64, 64, 16) == 0  # 16 * 128 numbers twice are no fewer than 4096
    assert thin_rank(1000, 4, 8) == 0


@pytest.mark.parametrize(
    ("name", "shape", "whole_on_tp", "at_both_ends", "sync", "is_exact"),
    [
        ("blocks.0.attention.q.weight", (256, 256), False, False, "int8", False),
        ("blocks.0.attention_norm.weight", (256,), False, False, "int8", True),
        ("blocks.0.mlp.router.weight", (256, 256), False, False, "int8", True),
        ("blocks.0.attention.q.weight", (256, 256), True, False, "int8", True),
        ("embedding.weight", (256, 256), False, True, "int8", True),
        ("embedding.weight", (256, 256), False, False, "int8", False),
        ("blocks.0.attention.q.weight", (4, 4), False, False, "int8", True),
        ("blocks.0.attention_norm.weight", (256,), False, False, "bf16", False),
        ("blocks.0.attention.q.weight", (256, 256), False, False, "exact", True),
        ("blocks.0.attention.q.weight", (256, 256), False, False, "diloco", True),
    ],
)
def test_what_no_compressor_touches(name, shape, whole_on_tp, at_both_ends, sync, is_exact):
    settings = SyncConfig(min_elements=1000)
    assert is_summed_exactly(name, shape, whole_on_tp, at_both_ends, sync, settings) is is_exact


@pytest.mark.parametrize(
    ("from_step", "steps", "rounds"), [(0, 20, (0, 4)), (0, 21, (0, 5)), (3, 13, (3, 2)), (30, 20, (20, 0))]
)
def test_steps_that_sum_gradients_and_rounds_after_them(from_step, steps, rounds):
    assert rounds_in(OuterConfig(every_steps=10, fragments=2, from_step=from_step), steps) == rounds
