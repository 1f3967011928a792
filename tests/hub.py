"""A small server of Hugging Face's hub: what HfFileSystem asks for to list and read files, over real HTTP."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "1" * 40


@contextmanager
def hub(name: str, files: Mapping[str, bytes], kind: Literal["datasets", "models"] = "datasets") -> Iterator[str]:
    """Serve the data set or model `name` (OWNER/NAME), and yield the address for HF_ENDPOINT."""

    class Handler(_Handler):
        repository, content, api = name, files, kind

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repository: str
    content: Mapping[str, bytes]
    api: str

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        api = f"/api/{self.api}/{self.repository}"
        files = f"{'/datasets' if self.api == 'datasets' else ''}/{self.repository}/resolve/"
        if path.startswith(files):
            self._file(path.removeprefix(files).partition("/")[2])
        elif path.startswith(f"{api}/tree/"):
            folder = path.removeprefix(f"{api}/tree/").partition("/")[2]
            recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() == "true"
            self._json(self._tree(folder, recursive))
        elif path in (api, f"{api}/revision/main"):
            self._json({"_id": "1", "id": self.repository, "sha": COMMIT, "private": False, "siblings": []})
        else:
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        try:
            asked = json.loads(body)["paths"]
        except ValueError:
            asked = parse_qs(body)["paths"]
        every = {entry["path"]: entry for entry in self._tree("", recursive=True)}
        self._json([every[path] for path in ([asked] if isinstance(asked, str) else asked) if path in every])

    def _tree(self, folder: str, recursive: bool) -> list[dict[str, object]]:
        prefix, entries = f"{folder}/" if folder else "", {}
        for path, data in self.content.items():
            if not path.startswith(prefix):
                continue
            parts = path.removeprefix(prefix).split("/")
            for depth in range(1, len(parts)):
                if depth == 1 or recursive:
                    name = prefix + "/".join(parts[:depth])
                    entries[name] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
            if len(parts) == 1 or recursive:
                oid = hashlib.sha1(data).hexdigest()
                entries[path] = {"type": "file", "oid": oid, "size": len(data), "path": path}
        return list(entries.values())

    def _file(self, path: str) -> None:
        if (data := self.content.get(path)) is None:
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        code, headers = 200, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            code, whole = 206, len(data)
            end = min(int(last or whole - 1), whole - 1)
            headers["Content-Range"] = f"bytes {first}-{end}/{whole}"
            data = data[int(first) : end + 1]
        self._send(code, data, {**headers, "Accept-Ranges": "bytes"})

    def _json(self, answer: object, code: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self._send(code, json.dumps(answer).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, code: int, data: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
