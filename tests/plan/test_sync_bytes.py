"""The bytes of rounds follow from the run file."""

from __future__ import annotations

from argosy.config.sync import OuterConfig
from argosy.plan.sync import fragments_of, sent_in_run, sent_in_turn

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
