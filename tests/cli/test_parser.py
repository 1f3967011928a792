"""What tyro says becomes one sentence; the text above the options of a help is filled."""

import pytest

from argosy.cli import compare, metrics, runs
from argosy.cli.options import parse
from argosy.cli.parser import fitted
from argosy.errors import UserError


def test_the_text_above_the_options_is_filled_and_a_command_is_not_broken():
    command = "  argosy " + "word " * 20 + "end"
    above = f"One two `argosy config\nshow` three. {'more ' * 30}"
    text = f"{above}\n\nExamples:\n{command}\n  argosy x    does {'this ' * 15}"
    lines = fitted(text, 60).splitlines()
    assert lines[0] == "One two `argosy config show` three. more more more more more"
    assert command in lines and "  argosy x" in lines
    assert max(len(line) for line in lines if line != command) <= 60


@pytest.mark.parametrize(
    ("options", "words", "said"),
    [
        (runs, "--jsn", "--jsn: unknown option; did you mean --json"),
        (runs, "--bogus r", "--bogus: unknown option; there are: "),
        (runs, "--folder r", "--folder: unknown option; give its value alone"),
        (metrics, "--jsn", "--jsn: unknown option; did you mean --json"),
        (metrics, "--run r", "--run: unknown option; give its value alone"),
        (compare, "a --jsn", "--jsn: unknown option; did you mean --json"),
    ],
)
def test_an_unknown_option_is_told_though_the_first_argument_is_missing(options, words, said):
    with pytest.raises(UserError, match=f"^{said}"):
        parse(words.split(), "argosy test", options.Options)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("r --from x", "--from x: must be a whole number"),
        ("--from 3", "Missing from argosy test:\n  PATH: A run's folder"),
    ],
)
def test_other_mistakes_are_told_as_they_are(words, said):
    with pytest.raises(UserError, match=rf"^{said}\.\n"):
        parse(words.split(), "argosy test", metrics.Options)
