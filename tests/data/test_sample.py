from __future__ import annotations

from pathlib import Path

from argosy.config.data import PrepareConfig
from argosy.data.sample import FILES, sample_texts
from argosy.data.sources import find_files


def sample(folder: Path, max_chars: int, **options: int) -> list[str]:
    config = PrepareConfig(input=(str(folder),), **options)
    return list(sample_texts(find_files(config.input).files, config, max_chars))


def test_small_input_is_taken_whole(tmp_path: Path) -> None:
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text(str(i) * (i + 1))
    assert sample(tmp_path, 1000) == ["0", "11", "222", "3333", "44444"]


def test_long_document_is_sampled_from_end_to_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(chr(ord("a") + i // 100) for i in range(1600)))
    assert "".join(sample(tmp_path, 32)) == "".join(chr(ord("a") + i) * 2 for i in range(16))


def test_every_file_gives_its_share(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 1000)
    assert [text[0] for text in sample(tmp_path, 300)][::16] == ["a", "b", "c"]
    assert sum(map(len, sample(tmp_path, 300))) <= 300


def test_files_are_chosen_evenly(tmp_path: Path) -> None:
    for i in range(2 * FILES):
        (tmp_path / f"{i:05}.txt").write_text(f"{i:05}")
    assert sample(tmp_path, 10**6) == [f"{i:05}" for i in range(0, 2 * FILES, 2)]


def test_text_beyond_max_text_bytes_is_left_out(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 10)
    assert sample(tmp_path, 1000, max_text_bytes=15) == ["a" * 10, "b" * 10]
