"""Every key of a TOML text is found at its line, however it is written."""

import os
import random
from pathlib import Path

import pytest

from argosy.config.lines import Key, key_lines, read_toml
from argosy.config.load import MOST_PROBLEMS, load
from argosy.errors import UserError

TEXT = '''\
# a comment
name = "x"  # [not a table]
a.b = 1
"quo ted" = """
[also.not]
c = 3
"""

[table]
list = [
  1,  # one
  { inner = 2 },
]
table2 = { deep = { er = 1 } }

[[rows]]
x = 1
[[rows]]
x = 2
[rows.sub]
y = 3
'''


def test_every_key_is_found_at_its_line():
    for text in (TEXT, TEXT.replace("\n", "\r\n")):
        assert key_lines(text.replace("\r\n", "\n")) == {
            ("name",): 2,
            ("a",): 3,
            ("a", "b"): 3,
            ("quo ted",): 4,
            ("table",): 9,
            ("table", "list"): 10,
            ("table", "table2"): 14,
            ("table", "table2", "deep"): 14,
            ("table", "table2", "deep", "er"): 14,
            ("rows", 0): 16,
            ("rows", 0, "x"): 17,
            ("rows", 1): 18,
            ("rows", 1, "x"): 19,
            ("rows", 1, "sub"): 20,
            ("rows", 1, "sub", "y"): 21,
        }


VALUES = [
    "1", "1.5", "true", '"[x"', "'# \"'", '"a\\"]"', '["a", 1.5] # ]', "[\n  1, # [\n  [2],\n]", "{ b.c = 1 }",
    '"""\n[no]\nx = 1\n"""', '"""a\\"""b"""', '"""a"""""', "'''\n\\\n'''", "'''a'''''",
    "2020-01-01T00:00:00Z", '""', "[]", "{}",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
def test_whatever_stands_between_them_keys_are_found(seed: int) -> None:
    chance, text, expected, table = random.Random(seed), "", dict[Key, int](), ""
    for number in range(40):
        text += chance.choice(["", "", "\n", "# [comment] '\n", "  \t\n"])
        line = text.count("\n") + 1
        if chance.random() < 0.2:
            table = chance.choice([f"t{number}", f"'t {number}'"])
            text += f"[{table}]\n"
            expected[(table.strip("'"),)] = line
        else:
            name = chance.choice([f"k{number}", f'"k{number}"', f"'k{number}'"])
            text += f"{name} = {chance.choice(VALUES)}\n"
            key = (f"k{number}",)
            expected[(table.strip("'"), *key) if table else key] = line
    found = key_lines(text)
    assert {key: line for key, line in found.items() if key in expected} == expected
    assert all(key[:-2] in expected or key[:-1] in expected for key in found.keys() - expected.keys())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#" * 2**20 + "\n", "has more than 1 MiB: it is not what its name says"),
        ("\nx = " + "[" * 10**5, ":2: more than 32 names in one key, or brackets inside of each other"),
        ("x = " + "{a = " * 10**5 + "1" + "}" * 10**5, ":1: more than 32 names"),
        ("a" + ".a" * 10**5 + " = 1", ":1: more than 32 names"),
        ("[a" + " . 'a'" * 10**5 + "]", ":1: more than 32 names"),
        ("x = " + "1" * 10**4, "not TOML: Exceeds the limit"),
        ("x = " + "\\" * 10**5, ":1:5: Invalid value"),
        ('x = "' + '\\"' * 10**5, ":1:"),
        ('"""' + '\\"""' * 10**5, ":1:"),
        ("'\"" * 10**5, ":1:"),
    ],
)
def test_what_no_run_file_has_is_refused_at_once_and_in_few_words(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UserError) as refused:
        read_toml(tmp_path / "run.toml")
    assert said in str(refused.value)
    assert len(str(refused.value)) < 600 + len(str(tmp_path))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.toml")
    with pytest.raises(UserError, match="not a regular file"):
        read_toml(tmp_path / "run.toml")


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"k{number} = 1\n" for number in range(5000)),
        "".join(f"[a{number}]\n" for number in range(5000)),
        "".join(f"[[data.stages]]\nk{number} = 1\n" for number in range(1000)),
        "[data.sources]\n" + "".join(f"k{number} = 'a'\n" for number in range(5000)),
        "x = [\n" + "1,\n" * 10**5 + "]\n" + "".join(f"k{number} = 1\n" for number in range(50)),
    ],
    ids=["keys", "tables", "list", "values", "lines"],
)
def test_of_many_problems_the_first_are_named_and_the_others_counted(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UserError) as refused:
        load(tmp_path / "run.toml")
    said = str(refused.value).splitlines()
    assert len([line for line in said if "run.toml:" in line]) == MOST_PROBLEMS
    assert said[-1].startswith("... and ") and said[-1].endswith(" more problems")
