from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from argosy.config.data import PrepareConfig
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


def test_file_named_itself_may_have_any_suffix(tree: Path) -> None:
    assert names(tree / "sub/image.png") == ["image.png"]


def test_kind_and_compression_come_from_the_name(tree: Path) -> None:
    (gz,) = find_files([str(tree / "sub/c.jsonl.gz")]).files
    assert (gz.suffix, gz.compression, gz.size) == (".jsonl", ".gz", 1)


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
    assert names(tmp_path) == ["a.md"]
