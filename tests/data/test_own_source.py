"""A source of the user's is prepared like any text, and must yield the same documents again."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.config.data import PrepareConfig
from argosy.config.extend import ExtendConfig
from argosy.data import prepare as module
from argosy.data.prepare import prepare
from argosy.errors import UserError

SUMS = "def f(argument):\n    for i in range(int(argument or 300)): yield f'{i} and {i} are {i + i}'\n"


def extend(folder: Path, text: str = SUMS) -> ExtendConfig:
    path = folder / "mine.py"
    path.write_text(f"import random\nfrom argosy import extend\n@extend.source('sums')\n{text}")
    return ExtendConfig(files=(path,))


def config(folder: Path, item: str = "source:sums", **keys: object) -> PrepareConfig:
    return PrepareConfig(input=(item,), out=folder / "out", vocab_size=300, processes=1, **keys)


def test_its_documents_are_those_of_the_same_text_in_a_file(tmp_path):
    manifest = prepare(config(tmp_path, "source:sums:500"), extend=extend(tmp_path))
    lines = tmp_path / "same.jsonl"
    lines.write_text("".join(f'{{"text": "{i} and {i} are {i + i}"}}\n' for i in range(500)))
    same = prepare(PrepareConfig(input=(str(lines),), out=tmp_path / "same", vocab_size=300, processes=1))
    assert manifest.splits == same.splits
    assert manifest.tokenizer_sha256 == same.tokenizer_sha256
    assert prepare(config(tmp_path, "source:sums:500"), extend=extend(tmp_path)) == manifest


def test_a_folder_of_other_code_is_refused(tmp_path):
    prepare(config(tmp_path), extend=extend(tmp_path))
    with pytest.raises(UserError, match="prepared already, with other options"):
        prepare(config(tmp_path), extend=extend(tmp_path, SUMS.replace("are", "make")))


def test_other_extensions_in_the_file_of_a_source_may_change_unless_it_names_them(tmp_path):
    def told(by: str, names: str = "") -> ExtendConfig:
        callback = f"# {by}\n@extend.callback('after_step')\ndef told(run):\n    return {by}\n"
        return extend(tmp_path, f"{SUMS}    {names}\n\n{callback}")

    manifest = prepare(config(tmp_path), extend=told("1"))
    assert prepare(config(tmp_path), extend=told("2")) == manifest
    naming = PrepareConfig(**config(tmp_path).model_dump() | {"out": tmp_path / "naming"})
    prepare(naming, extend=told("1", "told"))
    with pytest.raises(UserError, match=r"prepared already, with other options \(own_sources = .*sums"):
        prepare(naming, extend=told("2", "told"))


def test_a_folder_that_was_prepared_before_sources_had_checksums_of_their_own_is_taken(tmp_path):
    mine = extend(tmp_path)
    manifest = prepare(config(tmp_path), extend=mine)
    options = {key: value for key, value in manifest.options.items() if key != "own_sources"}
    manifest.model_copy(update={"options": options | {"extend": mine.checksums}}).save(tmp_path / "out")
    assert prepare(config(tmp_path), extend=mine).splits == manifest.splits


def test_an_interrupted_prepare_goes_on_where_it_was(tmp_path, monkeypatch):
    whole = prepare(config(tmp_path / "whole", shard_tokens=800), extend=extend(tmp_path))
    monkeypatch.setattr(module, "BATCH_CHARS", 500)
    monkeypatch.setattr(module, "CHUNK_BYTES", 500)
    failing = SUMS.replace("yield", "\n        if i == 200 and not is_there(): raise OSError('gone')\n        yield")
    helper = f"import os\ndef is_there(): return os.path.exists({str(tmp_path / 'ok')!r})\n"
    mine = ExtendConfig(files=(_file(tmp_path, helper, failing),))
    with pytest.raises(UserError, match=r"raised OSError: gone, after 200 documents of source:sums"):
        prepare(config(tmp_path, shard_tokens=800), extend=mine)
    (tmp_path / "ok").touch()
    assert prepare(config(tmp_path, shard_tokens=800), extend=mine).splits == whole.splits


def _file(folder: Path, helper: str, function: str) -> Path:
    path = folder / "resumed.py"
    path.write_text(f"from argosy import extend\n{helper}@extend.source('sums')\n{function}")
    return path


@pytest.mark.parametrize(
    ("text", "item", "said"),
    [
        (SUMS, "source:sum", "input = source:sum: there is no source 'sum'; did you mean sums?"),
        (SUMS, "source:sums:many", "mine.py:5: the source sums raised ValueError: invalid literal"),
        ("def f(argument):\n    yield 3\n", "source:sums", "TypeError: document 1 is a int, not text"),
        (
            "def f(argument):\n    yield str(random.random())\n",
            "source:sums",
            "yields other documents when it is read again",
        ),
    ],
)
def test_what_a_source_must_not_do_is_refused_before_anything_is_written(text, item, said, tmp_path):
    with pytest.raises(UserError) as error:
        prepare(config(tmp_path, item), extend=extend(tmp_path, text))
    assert said in str(error.value)
    assert not (tmp_path / "out").exists()


def test_without_a_file_the_message_says_what_is_missing(tmp_path):
    with pytest.raises(UserError, match=r"no file of extensions declares one \(--extend FILE\)"):
        prepare(config(tmp_path))
