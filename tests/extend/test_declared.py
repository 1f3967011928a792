"""What a file declares is read from its text, and a mistake in it is found with its line; nothing of it is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.extend.declared import read_code

HEAD = "from argosy import extend\n\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "import argosy\n@argosy.extend.metric('m')\ndef f(run): ...",
        "import argosy.extend\n@argosy.extend.metric('m')\ndef f(run): ...",
        "import argosy as a\n@a.extend.metric(name='m')\ndef f(run): ...",
        "import argosy.extend as e\n@e.metric('m')\ndef f(run): ...",
        "from argosy import extend as e\n@e.metric('m')\ndef f(run, *rest): ...",
        "from argosy.extend import metric as measure\n@measure('m')\ndef f(run, more=1): ...",
    ],
)
def test_a_decorator_is_known_by_whatever_name_it_was_imported(text, tmp_path):
    (found,) = read_code(write(tmp_path, text)).declarations
    assert (found.kind, found.name, found.place) == ("metric", "m", f"{tmp_path}/mine.py:2")


def test_nothing_of_the_file_is_run(tmp_path):
    text = f"{HEAD}open('{tmp_path}/ran', 'w')\n@extend.callback('save')\ndef saved(run): ..."
    (found,) = read_code(write(tmp_path, text)).declarations
    assert (found.name, found.facts["point"], found.facts["strict"]) == ("saved", "save", False)
    assert not (tmp_path / "ran").exists()


def test_decorators_of_others_are_left_alone(tmp_path):
    text = (
        f"{HEAD}import functools\n@functools.cache\ndef f(): ...\n@extend.metric('m')\n@functools.cache\ndef g(r): ..."
    )
    assert [d.name for d in read_code(write(tmp_path, text)).declarations] == ["m"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def f(:\n", "mine.py:3: not Python"),
        ("x = " + "-" * 100_000 + "1\n", "mine.py: not Python: it is nested too deeply"),
        ("x = 1\n", "mine.py: declares nothing; put @extend.callback or"),
        ("@extend.calback('save')\ndef f(run): ...", "mine.py:3: there is no @extend.calback; did you mean callback?"),
        ("@extend.callback\ndef f(run): ...", "mine.py:3: @extend.callback needs its arguments, in parentheses"),
        ("@extend.callback('after_stp')\ndef f(run): ...", "there is no point 'after_stp'; did you mean after_step?"),
        ("@extend.callback('save', strickt=True)\ndef f(run): ...", "unexpected keyword argument 'strickt'"),
        ("@extend.callback('save', strict=1)\ndef f(run): ...", "strict = 1 must be True or False"),
        ("@extend.metric('a b')\ndef f(run): ...", "'a b' is no name"),
        ("@extend.metric('a', reduce='max')\ndef f(run): ...", "reduce = 'max' must be"),
        (
            "n = 'a'\n@extend.metric(n)\ndef f(run): ...",
            "mine.py:4: the arguments of @extend.metric must be written out",
        ),
        ("@extend.metric('a')\ndef f(): ...", "mine.py:3: a metric takes 1 argument, and f takes ()"),
        ("@extend.metric('a')\ndef f(run, step): ...", "a metric takes 1 argument, and f takes (run, step)"),
        ("@extend.metric('a')\ndef f(run, *, k): ...", "a metric takes 1 argument, and f takes (run, *, k)"),
        ("@extend.metric('a')\nasync def f(run): ...", "stands above a function (def)"),
        ("@extend.metric('a')\nclass F: ...", "stands above a function (def)"),
        ("@extend.sink('a')\ndef f(about): ...", "mine.py:3: @extend.sink stands above a class, not f"),
        (
            "if True:\n  @extend.metric('a')\n  def f(run): ...",
            "mine.py:4: @extend.metric stands inside of another block",
        ),
    ],
)
def test_a_mistake_is_told_with_its_line(text, said, tmp_path):
    with pytest.raises(ValueError) as error:
        read_code(write(tmp_path, HEAD + text))
    assert said in str(error.value)


def test_a_file_that_is_written_anew_is_read_anew(tmp_path):
    path = write(tmp_path, f"{HEAD}@extend.metric('a')\ndef f(run): ...")
    first = read_code(path)
    write(tmp_path, f"{HEAD}@extend.metric('other')\ndef f(run): ...")
    assert [d.name for d in read_code(path).declarations] == ["other"]
    assert read_code(path).sha256 != first.sha256


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        read_code(tmp_path / "none.py")
    with pytest.raises(ValueError, match="is not a file"):
        read_code(tmp_path)
