"""Compressed files of the input: gzip and zstd, of any number of members or frames."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, BinaryIO

from argosy.errors import imported

DECOMPRESS_BYTES = 2**20
"""Bytes that are read at once."""
ZSTD_WINDOW_BYTES = 2**31
"""The largest window of a .zst file, that of zstd --long=31; memory is taken only for what is unpacked."""


def decompressed(stream: Any, compression: str) -> BinaryIO:
    """Return a stream with what a file holds. compression: .gz, .zst or "".

    Reading it raises OSError, EOFError, zlib.error or zstandard.ZstdError for what is no such file, or is cut off.
    """
    if compression == ".gz":
        return gzip.GzipFile(fileobj=stream)  # type: ignore[return-value]
    if compression == ".zst":
        parts, unpacker = _frames(stream), zstandard().ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES)
        source = SimpleNamespace(read=lambda count: next(parts, b""))
        return io.BufferedReader(unpacker.stream_reader(source, read_across_frames=True))
    return stream


def _frames(stream: Any) -> Iterator[bytes]:
    """Yield a file of zstd frames (RFC 8878, section 3.1) in parts; the reader reports what is no frame.

    Raises: EOFError where the last one is cut off, which zstandard takes for a whole one.
    """

    def part(count: int) -> bytes:
        data = b""
        while len(data) < count:
            if not (more := stream.read(count - len(data))):
                raise EOFError("Compressed file ended before the end of its last frame")
            data += more
        return data

    while first := stream.read(1):
        yield (magic := first + part(3))
        if magic[0] >> 4 == 5:  # a frame to skip
            yield (size := part(4))
            left = int.from_bytes(size, "little")
            while left > 0:
                yield part(min(left, DECOMPRESS_BYTES))
                left -= DECOMPRESS_BYTES
            continue
        yield (flags := part(1))
        size_bytes, is_single, has_checksum, id_bytes = flags[0] >> 6, flags[0] & 32, flags[0] & 4, flags[0] & 3
        yield part(bool(size_bytes or is_single) * 2**size_bytes + (not is_single) + (0, 1, 2, 4)[id_bytes])
        is_last = False
        while not is_last:
            block = int.from_bytes(head := part(3), "little")
            is_repeated, is_last = block >> 1 & 3 == 1, bool(block & 1)
            yield head + part(1 if is_repeated else block >> 3)
        if has_checksum:
            yield part(4)


def zstandard() -> Any:
    """Return the package. Raises: UserError if it is missing."""
    return imported("zstandard", "zstd", "Reading .zst files")
