from __future__ import annotations

import gzip
import io
import json
import tracemalloc
from codecs import BOM_UTF8
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from argosy.config.data import PrepareConfig
from argosy.data import documents as module
from argosy.data.documents import (
    DOCUMENTS_PIECE_BYTES,
    FILES,
    LEAST_PIECE_BYTES,
    MOST_OF_BEFORE,
    DocumentReader,
    InputPiece,
    cut_input,
    sample_texts,
)
from argosy.data.formats import RecordFields, Text, read_file, text_lines
from argosy.data.sources import InputFile, find_files
from argosy.errors import UserError


def reader(*paths: Path, field: str = "text", max_text_bytes: int | None = None, **options: Any) -> DocumentReader:
    found = find_files(map(str, paths), fields=[field] * len(paths))
    return DocumentReader(found.files, PrepareConfig(**options), None, max_text_bytes)


def texts(*paths: Path, **options: Any) -> list[str]:
    return [document.text for document in reader(*paths, **options).read()]


def jsonl(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(name: str, data: bytes) -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return write_file


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.jsonl.gz"])
def test_a_file_that_ends_before_its_size_is_refused(write: Any, name: str) -> None:
    data = jsonl(*({"text": f"text {number}"} for number in range(9)))
    path = write(name, gzip.compress(data) if name.endswith(".gz") else data)
    found = reader(path)
    assert list(found.read())
    path.write_bytes(gzip.compress(data[:80]) if name.endswith(".gz") else data[:80])  # as a server that sends less
    with pytest.raises(UserError, match=rf"{name}: cannot be read \(it ended after \d+ of its \d+ bytes\)"):
        list(found.read())


def test_text_file_is_one_document(write: Any) -> None:
    assert texts(write("a.txt", "zwei\nZeilen ü".encode()), write("b.py", b"\xef\xbb\xbfx = 1")) == [
        "zwei\nZeilen ü",
        "x = 1",
    ]


def test_compressed_files_are_read_alike(write: Any) -> None:
    data = jsonl({"text": "one"}, {"text": "two"})
    frames = zstandard.compress(data[:17]) + zstandard.compress(data[17:])  # several frames, as pzstd writes
    plain, gz, zst = write("a.jsonl", data), write("b.jsonl.gz", gzip.compress(data)), write("c.ndjson.zst", frames)
    assert texts(plain) == texts(gz) == texts(zst) == ["one", "two"]


def test_json_of_records_is_read_as_jsonl(write: Any) -> None:
    """As C4 and Dolma are; other .json is a text, as code is."""
    data = jsonl({"text": "one"}, {"text": None}, {"text": "two" * 2**20})
    assert texts(write("a.json.gz", gzip.compress(data))) == ["one", "two" * 2**20]
    for name, other in {"b.json": b'{\n "text": "one"}\n', "c.json": jsonl({"name": "x"}), "d.json": data[:9]}.items():
        assert texts(write(name, other)) == [other.decode()]


@pytest.mark.parametrize("indent", [None, 2])
def test_conversations_may_be_an_array_of_json(write: Any, indent: int | None) -> None:
    """As Alpaca's and ShareGPT's are; a record a line, too."""
    records = [{"n": n, "said": "naïve\u2028"} for n in range(3)]
    fields, array = RecordFields("text", document_of=json.dumps), json.dumps([*records, 5], indent=indent)

    def found(name: str, data: bytes) -> list[Any]:
        (file,) = find_files([str(write(name, data))]).files
        return list(read_file(file, fields))

    *read, bad = found("a.json.gz", gzip.compress(BOM_UTF8 + array.encode()))
    assert read == found("b.json", jsonl(*records)) == [Text(json.dumps(record).encode()) for record in records]
    assert (bad.kind, bad.where.rpartition("/")[2]) == ("not text", "a.json.gz, record 4 (an int, not a record)")
    (cut,) = found("c.json", array[:-1].encode())
    assert cut.kind == "broken JSON"


def test_zst_of_a_long_window_is_read(write: Any) -> None:
    keys = zstandard.ZstdCompressionParameters.from_level(1, window_log=31)
    frame = zstandard.ZstdCompressor(compression_params=keys).compressobj()
    assert texts(write("a.jsonl.zst", frame.compress(jsonl({"text": "one"})) + frame.flush())) == ["one"]


def test_a_byte_order_mark_costs_no_record(write: Any) -> None:
    data = jsonl({"text": "one"}, {"text": "two"})
    assert texts(write("a.jsonl", BOM_UTF8 + data)) == ["one", "two"]
    assert texts(write("b.jsonl", BOM_UTF8 + b"\n" + data)) == ["one", "two"]
    assert texts(write("c.jsonl", 2 * (BOM_UTF8 + data))) == 2 * ["one", "two"]


def test_parquet_column_is_read(tmp_path: Path) -> None:
    sizes = (pa.binary(), pa.large_binary(), pa.string(), pa.large_string(), pa.string_view())
    for kind in (*sizes, pa.dictionary(pa.int32(), pa.string())):
        values = pa.array(["one", "twö", None, ""]).cast(kind)
        pq.write_table(pa.table({"id": [1, 2, 3, 4], "body": values}), tmp_path / "a.parquet")
        assert texts(tmp_path / "a.parquet", field="body") == ["one", "twö"]


def test_broken_input_is_counted_by_kind(write: Any) -> None:
    lines = b'{"text": "good"}\n\n{"text": \n[1]\n{"text": 5}\n{"text": null}\n{"text": "\\ud800"}\n{"text": "\xff"}\n'
    read = reader(write("a.jsonl", lines), write("b.txt", b"ab\xffc"), write("c.txt", b""))
    assert [document.text for document in read.read()] == ["good"]
    assert read.tally.skipped == {"broken JSON": 1, "not text": 2, "empty document": 2, "broken UTF-8": 3}


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"ab\xffc", r"a\.txt, byte 2: broken UTF-8"),
        ("a.txt", BOM_UTF8 + b"ab\xffc", r"a\.txt, byte 5: broken UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text"', r"a\.jsonl, line 2, column 8 .*: broken JSON"),
        ("a.jsonl", b'{"text": "x", "n": ' + b"9" * 5000 + b"}", r"a\.jsonl, line 1 .*4300 digits.*: broken JSON"),
        (
            "a.jsonl",
            b"[" * 200_000,
            r"a\.jsonl, line 1 .*(recursion|Stack overflow).*: broken JSON",
        ),  # Python 3.14 says the latter
        ("a.jsonl", b'{"text": "\xff"}', r"a\.jsonl, line 1, byte 10 of the line: broken UTF-8"),
        ("a.jsonl", b'{"text": 5}', r"a\.jsonl, line 1, field 'text' \(an int\): not text"),
    ],
)
def test_broken_input_can_be_refused(write: Any, name: str, data: bytes, message: str) -> None:
    path = write(name, data)
    with pytest.raises(UserError, match=message + ".*on_bad_input = skip"):
        texts(path, on_bad_input="refuse")


@pytest.mark.parametrize("begin", [14, 15, 27])
def test_a_line_that_is_too_long_is_named_by_its_number_in_the_file(write: Any, begin: int) -> None:
    (file,) = find_files([str(write("a.jsonl", jsonl({"text": "a"}, {"text": "b"}) + b"c" * 5000))]).files
    with pytest.raises(UserError, match=r"a\.jsonl, line 3: .*more than max_document_bytes = 1000"):
        list(read_file(file, RecordFields("text"), 1000, (begin, None)))


def test_record_without_the_field_is_as_bad_as_any_other(write: Any) -> None:
    path = write("a.jsonl", jsonl({"text": "x"}, {"id": 1, "body": "y"}))
    read = reader(path)
    assert [document.text for document in read.read()] == ["x"]
    assert read.tally.skipped == {"no such field": 1}
    with pytest.raises(
        UserError, match=r"a\.jsonl, line 2, field 'text' \(the record has 'id', 'body'\): no such field"
    ):
        texts(path, on_bad_input="refuse")


def test_file_is_not_read_to_its_end_for_a_field_that_it_does_not_have(write: Any) -> None:
    without = [{"body": "y"}] * 999
    assert texts(write("a.jsonl", jsonl(*without, {"text": "x"}, *without, {"body": "y"}))) == ["x"]
    with pytest.raises(UserError, match=r"b\.jsonl, line 1000, field 'text' .*Set `field`"):
        texts(write("b.jsonl", jsonl(*without, {"body": "y"}, {"text": "x"})))


def test_a_table_adds_no_nulls_to_calls_of_tools(tmp_path: Path) -> None:
    rows = [{"calls": [{"arguments": given}]} for given in ({"city": "Oslo"}, {"a": 1, "b": None})]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "calls.parquet")
    (file,) = find_files([str(tmp_path / "calls.parquet")]).files
    found = [text.data for text in read_file(file, RecordFields("text", document_of=json.dumps))]
    assert found == [b'{"calls": [{"arguments": {"city": "Oslo"}}]}', b'{"calls": [{"arguments": {"a": 1}}]}']


@pytest.mark.parametrize(
    "at",
    [
        pa.array([10**15], pa.timestamp("s")),
        pa.array([2**30], pa.date32()),
        pa.array([0], pa.timestamp("s", "Nowhere")),
    ],
    ids=["time", "date", "zone"],
)
def test_a_table_with_a_time_that_python_does_not_have_is_refused(tmp_path: Path, at: pa.Array) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "at": at}), tmp_path / "a.parquet")
    (file,) = find_files([str(tmp_path / "a.parquet")]).files
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read as Parquet \("):
        list(read_file(file, RecordFields("text", document_of=json.dumps)))


def test_parquet_without_the_column_lists_the_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1], "body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: no column 'text'; the file has 'id', 'body'\. Set `field`"):
        texts(tmp_path / "a.parquet")
    with pytest.raises(UserError, match="column 'id' holds int64, not text"):
        texts(tmp_path / "a.parquet", field="id")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.txt.gz", b"no"),
        ("a.txt.gz", gzip.compress(b"x" * 99)[:-9]),
        ("a.txt.zst", b"no"),
        ("a.txt.zst", zstandard.compress(b"x" * 99)[:-1]),
        ("a.txt.zst", zstandard.compress(b"x" * 99) + zstandard.compress(b"y")[:5]),
        ("a.parquet", b"no"),
        ("a.jsonl.gz", b""),
        ("a.jsonl.zst", b""),
    ],
    ids=[
        "not gzip",
        "cut short",
        "not zstd",
        "cut zstd",
        "cut frame",
        "not parquet",
        "empty gzip",
        "empty zstd",
    ],  # gzip writes the time: workers of xdist would not agree
)
def test_damaged_file_is_refused(write: Any, name: str, data: bytes) -> None:
    path = write(name, data)
    with pytest.raises(UserError, match=rf"{name}: .*leave it out of `input`"):
        texts(path)


def test_a_page_that_is_not_as_its_checksum_says_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    as_is = {"use_dictionary": False, "write_statistics": False, "compression": "none"}
    pq.write_table(pa.table({"text": ["a long text"]}), path, write_page_checksum=True, **as_is)
    path.write_bytes(path.read_bytes().replace(b"a long text", b"a wrong one"))
    with pytest.raises(UserError, match=r"a.parquet: cannot be read .*CRC"):
        texts(path)


def test_file_that_vanished_is_refused(write: Any) -> None:
    path = write("a.txt", b"x")
    gone = reader(path)
    path.unlink()
    with pytest.raises(UserError, match=r"a\.txt: cannot be read"):
        list(gone.read())


class _Cut(SimpleHTTPRequestHandler):
    """Serves files as a whole, as it does everywhere, and of cut.txt less than it says."""

    def log_message(self, *words: object) -> None:
        pass

    def copyfile(self, source: Any, outputfile: Any) -> None:
        outputfile.write(source.read()[: 5 if "cut" in self.path else None])


def test_files_of_a_server_without_ranges_are_read_from_their_beginning(write: Any, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    text = "x" * (6 * 2**20)  # more than fsspec asks for at once
    pq.write_table(pa.table({"text": [text]}), tmp_path / "a.parquet", compression="none", use_dictionary=False)
    write("a.jsonl", jsonl({"text": text}))
    write("cut.txt", b"a text")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Cut, directory=str(tmp_path))) as server:
        Thread(target=server.serve_forever, daemon=True).start()

        def found(name: str) -> list[bytes]:
            (file,) = find_files([f"http://127.0.0.1:{server.server_port}/{name}"]).files
            return [item.data for item in read_file(file, RecordFields("text")) if isinstance(item, Text)]

        try:
            assert found("a.jsonl") == found("a.parquet") == [text.encode()]
            with pytest.raises(UserError, match=r"cut\.txt: cannot be read"):
                found("cut.txt")
        finally:
            server.shutdown()


def test_stops_after_max_text_bytes_at_a_whole_character(write: Any) -> None:
    first, second = write("a.txt", b"12345"), write("b.txt", "aüb".encode())
    assert texts(first, second, max_text_bytes=5) == ["12345"]
    assert texts(first, second, max_text_bytes=6) == ["12345", "a"]
    assert texts(first, second, max_text_bytes=7) == ["12345", "a"]
    assert texts(first, second, max_text_bytes=8) == ["12345", "aü"]


@given(st.integers(0, 7))
def test_reading_goes_on_from_any_document(tmp_path_factory: pytest.TempPathFactory, done: int) -> None:
    folder = tmp_path_factory.mktemp("in")
    (folder / "a.jsonl").write_bytes(
        jsonl({"text": "one"}, {"text": ""}, {"text": "two"}, {"text": 3}, {"text": "four"})
    )
    (folder / "b.txt").write_bytes(b"\xff")
    (folder / "c.jsonl").write_bytes(jsonl({"text": "five"}, {"text": "six"}, [], {"text": "seven"}))
    whole = reader(folder)
    documents = list(whole.read())
    if done < len(documents):
        resumed = reader(folder)
        assert list(resumed.read(start=documents[done].number)) == documents[done:]
        before = reader(folder)
        for document in before.read():
            if document.number == documents[done].number:
                break
        rest = whole.tally.skipped - before.tally.skipped
        assert resumed.tally.skipped == rest and resumed.number == whole.number


LIMIT = 2**20


def bombs() -> dict[str, bytes]:
    """Small files that unpack to 32 MB of one document or record."""
    line = b'{"text": "ok"}\n'
    zeros = bytes(32 * LIMIT)
    table = io.BytesIO()
    pq.write_table(pa.table({"text": ["x" * 2**16] * 3000}), table)  # one value in a dictionary, 3000 times
    value = io.BytesIO()
    pq.write_table(pa.table({"text": ["y" * (8 * LIMIT)]}), value, compression="zstd")
    return {
        "a.txt.gz": gzip.compress(zeros, 1),
        "a.txt.zst": zstandard.compress(zeros),
        "a.jsonl.gz": gzip.compress(line + zeros, 1),
        "a.jsonl.zst": zstandard.compress(line + zeros),
        "a.jsonl": line + zeros,
        "a.parquet.zst": zstandard.compress(zeros),
        "value.parquet": value.getvalue(),
        "rows.parquet": table.getvalue(),
    }


@pytest.fixture(scope="module")
def bomb_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bombs")
    for name, data in bombs().items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("a.txt.gz", r"a\.txt\.gz"),
        ("a.txt.zst", r"a\.txt\.zst"),
        ("a.jsonl.gz", r"a\.jsonl\.gz, line 2"),
        ("a.jsonl.zst", r"a\.jsonl\.zst, line 2"),
        ("a.jsonl", r"a\.jsonl, line 2"),
        ("a.parquet.zst", r"a\.parquet\.zst"),
        ("value.parquet", r"value\.parquet, row group from row 0"),
    ],
)
def test_what_unpacks_to_too_much_is_named_and_takes_little_memory(bomb_files: Path, name: str, where: str) -> None:
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    with pytest.raises(UserError, match=rf"{where}: .*more than max_document_bytes = {LIMIT} bytes"):
        texts(bomb_files / name, max_document_bytes=LIMIT)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * LIMIT and pa.total_allocated_bytes() - before < 16 * LIMIT


def test_a_list_of_many_equal_values_in_a_few_bytes_is_named(tmp_path: Path) -> None:
    path, count = tmp_path / "list.parquet", LIMIT // 2
    lists = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.array(np.zeros(count, np.int8)))
    pq.write_table(pa.table({"messages": lists}), path)
    fields = RecordFields("messages", document_of=lambda record: str(len(record["messages"])))
    with pytest.raises(UserError, match=rf"list.parquet, row group from row 0: \d+ bytes with {count - 1} values: "):
        list(read_file(find_files([str(path)]).files[0], fields, LIMIT))
    assert len(list(read_file(find_files([str(path)]).files[0], fields, 8 * LIMIT))) == 1


@pytest.mark.parametrize("document_of", [None, lambda record: "a"], ids=["text", "records"])
def test_a_value_that_is_stored_once_for_many_rows_is_not_unpacked_for_all_of_them(
    bomb_files: Path, document_of: Callable[[dict[str, Any]], str] | None
) -> None:
    """A row is no longer than may be; a thousand of them at once would be."""
    (file,) = find_files([str(bomb_files / "rows.parquet")]).files
    found = read_file(file, RecordFields("text", document_of=document_of), LIMIT)
    most = 0
    for _ in zip(range(3000), found, strict=False):
        most = max(most, pa.total_allocated_bytes())
    assert most < 8 * LIMIT


def test_the_limit_can_be_raised_and_does_not_hold_for_a_text_file_of_that_size(write: Any) -> None:
    long = b"a" * (2 * LIMIT)
    assert texts(write("a.txt", long), max_document_bytes=LIMIT) == [long.decode()]
    assert texts(write("a.txt.gz", gzip.compress(long)), max_document_bytes=2 * LIMIT) == [long.decode()]
    assert texts(write("a.jsonl", jsonl({"text": "b" * LIMIT})), max_document_bytes=2 * LIMIT) == ["b" * LIMIT]


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(1, 30))
def test_lines_are_those_of_the_file_however_it_is_read(lines: list[bytes], chunk: int) -> None:
    data = b"\n".join(lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("argosy.data.formats.DECOMPRESS_BYTES", chunk)
        found = list(text_lines(io.BytesIO(data), str, 1000))
    assert found == [line.removesuffix(b"\n") for line in io.BytesIO(data)]


def spans(size: int | None, parts: int) -> list[tuple[int, int | None]]:
    """Return parts of a file, which are about as long."""
    ends = [(size or 0) * part // parts for part in range(parts)]
    return list(zip(ends, [*ends[1:], None], strict=True))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 9))
def test_parts_of_a_file_hold_each_line_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], parts: int
) -> None:
    path = tmp_path_factory.mktemp("in") / "a.jsonl"
    path.write_bytes(jsonl(*({"text": f"{number}" + "x" * length} for number, length in enumerate(lengths))))
    (file,) = find_files([str(path)]).files
    found = [text for span in spans(file.size, parts) for text in read_file(file, RecordFields("text"), within=span)]
    assert found == list(read_file(file, RecordFields("text")))


@given(st.integers(1, 30), st.integers(1, 9))
def test_parts_of_a_parquet_file_hold_each_row_once(
    tmp_path_factory: pytest.TempPathFactory, rows: int, parts: int
) -> None:
    path = tmp_path_factory.mktemp("in") / "a.parquet"
    table = pa.table({"id": list(range(rows)), "text": [f"{row}" * row for row in range(rows)]})
    pq.write_table(table, path, row_group_size=4)
    (file,) = find_files([str(path)]).files
    found = [text for span in spans(file.size, parts) for text in read_file(file, RecordFields("text"), within=span)]
    assert found == list(read_file(file, RecordFields("text"))) and len(found) == rows


def test_a_piece_is_read_like_its_files(write: Any) -> None:
    paths = [write(f"{name}.txt", name.encode()) for name in "abcd"]
    assert [(d.text, d.number, d.file) for d in reader(*paths).read(InputPiece(1, 3))] == [("b", 0, 1), ("c", 1, 2)]


MB = 10**6


def file(name: str, size: int | None) -> InputFile:
    return InputFile(name, None, name, size, "")


@given(st.lists(st.tuples(st.sampled_from(("a.txt", "a.jsonl", "a.jsonl.gz")), st.integers(0, 400) | st.none())))
def test_every_byte_of_every_file_is_in_one_piece(found: list[tuple[str, int | None]]) -> None:
    files = [file(name, size) for name, size in found]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LEAST_PIECE_BYTES", 10)
        pieces = cut_input(files, most_bytes=50)
    at: tuple[int, int | None] = (0, 0)
    for piece in pieces:
        assert (piece.first, piece.from_byte) == at
        at = (piece.end, 0) if piece.to_byte is None else (piece.first, piece.to_byte)
        assert piece.to_byte is None or piece.end == piece.first + 1
    assert at == (len(files), 0)
    whole = [files[piece.first : piece.end] for piece in pieces if piece.end > piece.first + 1]
    assert all(sum(file.size or 0 for file in held) <= 50 for held in whole)


@pytest.mark.parametrize(
    "files", [[file("a.jsonl", 3000 * MB)], [file("a.txt", 20_000)] * 150_000], ids=["one", "many"]
)
def test_pieces_grow_with_what_is_before_them(files: list[InputFile]) -> None:
    pieces, before, least = cut_input(files), 0, 0
    for piece in pieces[:-1]:
        end = 20_000 * piece.end if piece.to_byte is None else piece.to_byte
        size = end - before
        assert least <= size <= min(DOCUMENTS_PIECE_BYTES, max(LEAST_PIECE_BYTES, before * MOST_OF_BEFORE))
        before, least = end, size - 20_000
    assert len(pieces) < 3000 * MB / DOCUMENTS_PIECE_BYTES + 80


def test_a_small_input_is_shared_evenly() -> None:
    assert cut_input([file("a.jsonl", 3 * LEAST_PIECE_BYTES)]) == [
        InputPiece(0, 1, 0, LEAST_PIECE_BYTES),
        InputPiece(0, 1, LEAST_PIECE_BYTES, 2 * LEAST_PIECE_BYTES),
        InputPiece(0, 1, 2 * LEAST_PIECE_BYTES),
    ]


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
