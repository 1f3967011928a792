"""What is wrong with a key is said with what is allowed, and ends in what to do."""

from __future__ import annotations

import pytest

from argosy.config.load import load
from argosy.config.problems import allowed, shown, suggestion
from argosy.config.schema import RunConfig
from argosy.config.section import key_fields, key_of
from argosy.errors import UserError

KEYS = key_fields(RunConfig)


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("learning_rate", "here it is optimizer.lr."),
        ("train.globalbatch", "did you mean train.global_batch?"),
        ("optimzer.lr", "did you mean optimizer.lr?"),
        ("train.lr", "it exists at optimizer.lr."),
        ("schedule.zzz", "schedule has: kind, warmup_steps, warmup_fraction, decay_fraction, final_ratio."),
        ("num_train_epochs", "here it is train.epochs."),
    ],
)
def test_an_unknown_key_leads_to_the_one_that_was_meant(typed: str, answer: str) -> None:
    assert suggestion(key_of(typed), KEYS).startswith(answer)


def test_options_are_named_as_options() -> None:
    assert suggestion(key_of("batch_size"), KEYS, mark="--") == "here it is --train.global_batch."


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("train.global_batch", "a whole number above 0 and of at most 1073741824"),
        ("optimizer.beta1", "a finite number of at least 0 and below 1"),
        ("checkpoint.background", "true or false"),
        ("schedule.kind", 'one of "cosine", "wsd", "constant"'),
        ("sync.block", "a whole number of at least 16 and of at most 65536 and a multiple of 16"),
    ],
)
def test_what_a_key_takes_is_said_in_words(key: str, words: str) -> None:
    assert allowed(KEYS[key_of(key)]) == words


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        ({"schedule.kind": "cosin"}, 'Try "cosine".'),
        ({"train.steps": "100"}, "Try 100, without the quotes."),
        ({"resilience.grace_s": "2m"}, "Try 120, without the quotes."),
        ({"optimizer.eps": -1}, "Try 1e-08, the default."),
    ],
)
def test_a_wrong_value_comes_with_one_to_try(overrides: dict[str, object], remedy: str) -> None:
    with pytest.raises(UserError) as refused:
        load(None, overrides)
    assert remedy in str(refused.value)


def test_long_values_are_cut() -> None:
    assert shown("x" * 100) == '"' + "x" * 56 + "..."
