from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from argosy.config.data import PrepareConfig
from argosy.config.extend import ExtendConfig
from argosy.data import prepare as module
from argosy.data import sources
from argosy.data.prepare import prepare
from argosy.data.sources import find_files
from argosy.errors import UserError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.md", "sub/c.jsonl.gz", "sub/d.PARQUET", "sub/image.png", ".git/x.txt", "sub/.hidden.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


def names(*items: str | Path) -> list[str]:
    return [Path(file.path).name for file in find_files(map(str, items)).files]


def test_folder_gives_known_kinds_in_order_without_hidden_files(tree: Path) -> None:
    assert names(tree) == ["a.md", "b.txt", "c.jsonl.gz", "d.PARQUET"]


def test_files_of_no_known_kind_are_told_unless_another_item_names_them(tree: Path) -> None:
    found = find_files([str(tree), str(tree / "sub" / "image.png")])
    assert "image.png" in [Path(file.name).name for file in found.files] and not found.left_out
    assert [Path(file.name).name for file in find_files([str(tree)] * 2).left_out] == ["image.png"]


@pytest.mark.parametrize("extensions", [["png"], [".PNG"], ["*"]])
def test_extensions_are_read_that_are_asked_for(tree: Path, extensions: list[str]) -> None:
    found = find_files([str(tree)], extensions)
    assert not found.left_out and "image.png" in [Path(file.name).name for file in found.files]


def test_items_keep_their_order_and_globs_are_sorted(tree: Path) -> None:
    assert names(tree / "b.txt", tree / "*.*", tree / "**/*.gz") == ["b.txt", "a.md", "b.txt", "c.jsonl.gz"]


def test_hidden_files_are_in_no_glob_that_does_not_name_them(tree: Path) -> None:
    assert names(tree / "**") == ["a.md", "b.txt", "c.jsonl.gz", "d.PARQUET"]
    assert names(tree / ".git" / "*", tree / "*" / ".h*.txt") == ["x.txt", ".hidden.txt"]


def test_file_named_itself_may_have_any_suffix(tree: Path) -> None:
    assert names(tree / "sub/image.png") == ["image.png"]


def test_kind_and_compression_come_from_the_name(tree: Path) -> None:
    (gz,) = find_files([str(tree / "sub/c.jsonl.gz")]).files
    assert (gz.suffix, gz.compression, gz.size) == (".jsonl", ".gz", 1)


def test_links_are_followed_and_no_file_is_read_twice(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    away = tmp_path_factory.mktemp("away")
    (away / "blob").write_text("x")
    (away / "e.txt").write_text("x")
    (away / "circle").symlink_to(tree)
    for name, target in {
        "blob.txt": away / "blob",
        "again.txt": away / "blob",
        "alias.txt": tree / "b.txt",
        "folder": away,
        "nowhere.md": away / "gone",
    }.items():
        (tree / name).symlink_to(target)
    expected = ["a.md", "again.txt", "b.txt", "e.txt", "nowhere.md", "c.jsonl.gz", "d.PARQUET"]
    assert names(tree) == expected
    assert names(tree / "*.txt") == ["again.txt", "b.txt"] and names(tree / "bl*") == ["blob.txt"]


def test_the_query_of_a_url_is_no_part_of_a_suffix(tree: Path) -> None:
    (tree / "what?.jsonl").write_bytes(b"x")
    (local,) = find_files([str(tree / "what?.jsonl")]).files
    remote = replace(local, path="https://example.org/a.parquet?download=x.txt")
    assert (local.suffix, remote.suffix) == (".jsonl", ".parquet")


def test_urls_go_through_fsspec(tree: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe({"/corpus/2.txt": b"two", "/corpus/1.txt": b"one"})
    try:
        assert [file.name for file in find_files(["memory://corpus"]).files] == [
            "memory:///corpus/1.txt",
            "memory:///corpus/2.txt",
        ]
        assert names(f"file://{tree}/b.txt") == ["b.txt"]
    finally:
        memory.rm("/corpus", recursive=True)


def test_builtin_python_is_the_standard_library_then_torch() -> None:
    files = [file.path for file in find_files(["builtin:python"]).files]
    assert files == [file.path for file in find_files(["builtin:python"]).files]
    library, torch = [p for p in files if "site-packages" not in p], [p for p in files if "site-packages" in p]
    assert files == library + torch and library == sorted(library) and torch == sorted(torch)
    assert any(path.endswith("/abc.py") for path in library) and any("/torch/nn/" in path for path in torch)


def test_a_glob_that_spells_a_name_out_takes_it_whatever_its_kind(tmp_path: Path) -> None:
    for package in ("a", "b"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "copyright").write_text(package)
    assert [file.path for file in find_files([f"{tmp_path}/*/copyright"]).files] == [
        str(tmp_path / "a/copyright"),
        str(tmp_path / "b/copyright"),
    ]
    with pytest.raises(
        UserError, match=r"holds 2 files, none of a known kind \(\.txt .*\.parquet, also with .*\)\. If .*`extensions`"
    ):
        find_files([f"{tmp_path}/*/copy*"])


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("missing.txt", "there is no such file or folder"),
        ("*.nothing", r"this glob holds 0 files"),
        ("empty", r"this folder holds 1 files, none of a known kind"),
        ("builtin:ruby", "no such builtin corpus"),
        ("nowhere://x/y", "nowhere"),
    ],
)
def test_item_that_names_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, item: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "image.png").touch()
    with pytest.raises(UserError, match=message) as caught:
        find_files([item])
    assert f"input = {item}" in str(caught.value)


@pytest.mark.parametrize("item", ["", " "])
def test_empty_item_is_not_the_folder_that_one_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, item: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("not asked for")
    with pytest.raises(UserError, match=rf"input = '{item}': an empty name\. Name files"):
        find_files([item])


def test_no_input_is_refused() -> None:
    with pytest.raises(UserError, match="nothing to prepare"):
        find_files([])


class Unreachable(fsspec.AbstractFileSystem):
    """A file system whose server does not answer, as its client library says it: not with an OSError."""

    protocol = "unreachable"

    def info(self, path: str, **kwargs: object) -> dict[str, object]:
        raise RuntimeError("Name or service not known")


def test_a_server_that_cannot_be_reached_is_a_message() -> None:
    fsspec.register_implementation("unreachable", Unreachable, clobber=True)
    with pytest.raises(
        UserError, match=r"unreachable://data/x\.txt: cannot be read \(Name or service.*and the network"
    ):
        find_files(["unreachable://data/x.txt"])


def test_of_a_data_set_only_the_tables_of_its_train_split_are_read(tmp_path: Path) -> None:
    files = (
        "README.md",
        "data/train-00000-of-00001.parquet",
        "data/test-0.parquet",
        "validation/0-validation.parquet",
        "train/0.parquet",
    )
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = find_files([str(tmp_path)])
    assert [Path(file.name).relative_to(tmp_path).as_posix() for file in found.files] == [files[1], files[4]]
    assert len(found.other_splits) == 2
    assert len(find_files([str(tmp_path), str(tmp_path / files[2])]).other_splits) == 1  # one is named
    with pytest.raises(UserError, match=r"has no split train, but validation\. Name the files that are meant"):
        find_files([str(tmp_path / "validation")])


class Hub(MemoryFileSystem):
    protocol = ("hf",)


def test_tables_of_a_data_set_on_the_hub_may_be_json(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    files = [
        f"/c4/{name}" for name in ("README.md", "en/c4-train.0.json.gz", "en/c4-validation.0.json.gz", "info.json")
    ]
    monkeypatch.setattr(sources, "fsspec_place", lambda item: (hub, "/c4"))
    hub.pipe(dict.fromkeys(files, b"x"))
    found = find_files(["hf://datasets/allenai/c4"])
    hub.rm("/c4", recursive=True)
    assert [file.path for file in (*found.files, *found.other_splits)] == files[1:3]


def test_two_colons_in_a_path_are_part_of_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a::b").mkdir()
    Path("a::b/c::d.txt").write_text("text")
    for item in ("a::b", "a::b/c::d.txt", "a::*/*.txt", str(tmp_path / "a::b")):
        assert [file.path for file in find_files([item]).files] == [str(tmp_path / "a::b/c::d.txt")]
    with zipfile.ZipFile("texts.zip", "w") as archive:
        archive.writestr("e.txt", "text")
    assert [file.path for file in find_files(["zip://e.txt::texts.zip"]).files] == ["e.txt"], "a chain"


def test_a_folder_of_text_that_is_called_test_is_no_data_set(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    for name in ("a.py", "test/b.py", "train.jsonl", "c.parquet"):
        (tmp_path / name).write_bytes(b"x")
    assert len(find_files([str(tmp_path)]).files) == 4


def test_prepared_data_are_refused_as_input_and_left_out_of_a_folder_around_them(tmp_path):
    prepared = tmp_path / "data" / "mine"
    prepare(PrepareConfig(input=("builtin:python",), out=prepared, vocab_size=300, max_text_bytes=10_000, processes=1))
    (tmp_path / "a.md").write_text("text")
    with pytest.raises(UserError, match=r"input = \S+mine: this folder holds prepared data"):
        find_files([str(prepared)])
    assert names(tmp_path) == names(tmp_path / "**") == ["a.md"]
    (prepared / "manifest.json").rename(prepared / "prepare.journal")  # as if it was interrupted
    assert names(tmp_path) == ["a.md"]


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
    monkeypatch.setattr(module, "RESULT_BYTES", 500)
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
        ("def f(argument):\n    yield 3\n", "source:sums", "TypeError: document 1 is an int, not text"),
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
