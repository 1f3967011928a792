"""Exit codes tell apart who can mend what went wrong."""

from __future__ import annotations

import pytest

from argosy import errors
from argosy.cli import main
from argosy.errors import (
    EXIT_CODES,
    STOP_SIGNALS,
    ArgosyError,
    Interrupted,
    RunFailed,
    UserError,
    encodable,
    error_of,
    near_names,
    record_of_error,
)


def classes() -> list[type[ArgosyError]]:
    return [
        kind for kind in ArgosyError.__subclasses__() if kind.__module__ == errors.__name__ and kind is not Interrupted
    ]


def test_every_exit_code_is_explained_and_stands_in_the_help(capsys):
    assert {kind.exit_code for kind in classes()} | {0} | {128 + number for number in STOP_SIGNALS} == set(EXIT_CODES)
    assert main(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(meaning in text for meaning in EXIT_CODES.values())


@pytest.mark.parametrize("kind", classes())
def test_an_error_of_another_process_is_raised_as_what_it_was(kind):
    error = error_of(kind.exit_code, "text")
    assert type(error) is kind and str(error) == "text"


def test_an_error_that_is_not_ours_is_a_failed_run():
    assert type(error_of(17, "text")) is RunFailed


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "run.toml:14: plan.tp = 3 does not divide model.heads = 16. Try tp = 2 or 4.",
            {"file": "run.toml", "line": 14, "key": "plan.tp", "value": "3", "remedy": "Try tp = 2 or 4."},
        ),
        (
            'plan = "tp=3" (--plan) is for 3 processes. Try plan = "auto".',
            {"key": "plan", "value": '"tp=3"', "file": None},
        ),
        ("--lr: unknown option.", {"file": None, "line": None, "key": "--lr", "value": None, "remedy": None}),
        ("--since x: no such event. Try 10m.", {"key": "--since", "value": "x", "remedy": "Try 10m."}),
        ("--model and --run both name a model: give one of them.", {"key": "--model", "value": None}),
        ("nowhere: no such folder. Name a run's.", {"file": "nowhere", "key": None, "remedy": "Name a run's."}),
        ("no command 'trian'; did you mean train?", {"file": None, "key": None, "remedy": "did you mean train?"}),
    ],
)
def test_a_program_reads_what_an_error_names(text, named):
    record = vars(record_of_error(UserError(text)))
    assert record["error"] == text and record["exit_code"] == 2
    assert named.items() <= record.items()


def test_names_that_are_given_without_an_order_are_listed_in_one():
    names = {"mellow", "yellow", "fellow", "bellow"}
    assert near_names("ellow", names) == near_names("ellow", sorted(names))
    assert near_names("?", names) == "there are: bellow, fellow, mellow, yellow."


def test_text_can_be_encoded() -> None:
    assert encodable("a\udcffb").encode() == b"a?b"
