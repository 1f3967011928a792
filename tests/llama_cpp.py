"""llama.cpp itself, in the wheel of xllamacpp, by its C interface: what it computes of a file, how it splits text.

Structures of settings are only passed through: of their fields, none but the first of a context's is set.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

CONTEXT = 256
"""Tokens that a context has room for."""
Int, Pointer = ctypes.c_int32, ctypes.c_void_p


class _Settings(ctypes.Structure):
    """More bytes than any structure of settings has; those beyond it are ignored on both sides."""

    _fields_ = [("words", ctypes.c_uint32 * 256)]


class _Batch(ctypes.Structure):
    """llama_batch of llama.h."""

    _fields_ = [
        ("n_tokens", Int),
        ("token", ctypes.POINTER(Int)),
        ("embd", Pointer),
        ("pos", ctypes.POINTER(Int)),
        ("n_seq_id", ctypes.POINTER(Int)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(Int))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


_Log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, Pointer)
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llama_model_default_params": (_Settings, []),
    "llama_context_default_params": (_Settings, []),
    "llama_model_load_from_file": (Pointer, [ctypes.c_char_p, _Settings]),
    "llama_init_from_model": (Pointer, [Pointer, _Settings]),
    "llama_batch_init": (_Batch, [Int, Int, Int]),
    "llama_batch_free": (None, [_Batch]),
    "llama_decode": (Int, [Pointer, _Batch]),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [Pointer, Int]),
    "llama_model_get_vocab": (Pointer, [Pointer]),
    "llama_vocab_n_tokens": (Int, [Pointer]),
    "llama_tokenize": (Int, [Pointer, ctypes.c_char_p, Int, ctypes.POINTER(Int), Int, ctypes.c_bool, ctypes.c_bool]),
    "llama_model_chat_template": (ctypes.c_char_p, [Pointer, ctypes.c_char_p]),
    "llama_vocab_eos": (Int, [Pointer]),
    "llama_free": (None, [Pointer]),
    "llama_model_free": (None, [Pointer]),
    "llama_log_set": (None, [_Log, Pointer]),
}
_said: list[str] = []


@_Log
def _log(level: int, text: bytes, _: object) -> None:
    _said.append(text.decode(errors="replace"))


@cache
def _library() -> Any:
    found = importlib.util.find_spec("xllamacpp")
    if found is None or found.origin is None:
        pytest.skip("llama.cpp is not there: pip install xllamacpp")
    library = ctypes.CDLL(str(next(Path(found.origin).parent.glob("xllamacpp*.so"))))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_log_set(_log, None)
    library.llama_backend_init()
    return library


class LlamaCpp:
    """A GGUF file, opened by llama.cpp."""

    def __init__(self, file: Path):
        self._library = _library()
        _said.clear()
        settings = self._library.llama_model_default_params()
        self._model = self._library.llama_model_load_from_file(str(file).encode(), settings)
        assert self._model, "".join(_said)
        self._vocab = self._library.llama_model_get_vocab(self._model)

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.llama_model_free(self._model)

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the logits of each token, [tokens, vocabulary]."""
        library, settings = self._library, self._library.llama_context_default_params()
        settings.words[0] = CONTEXT  # n_ctx
        context = library.llama_init_from_model(self._model, settings)
        assert context, "".join(_said)
        batch = library.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
            batch.seq_id[i][0] = 0
        assert library.llama_decode(context, batch) == 0
        width = library.llama_vocab_n_tokens(self._vocab)
        rows = [np.ctypeslib.as_array(library.llama_get_logits_ith(context, i), (width,)) for i in range(len(ids))]
        found = torch.tensor(np.stack(rows))
        library.llama_batch_free(batch)
        library.llama_free(context)
        return found

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """Return the ids of a text; special: with what the tokenizer adds at its ends."""
        data = text.encode()
        found = (Int * (len(data) + 8))()
        count = self._library.llama_tokenize(self._vocab, data, len(data), found, len(found), special, False)
        return list(found[:count])

    @property
    def chat_template(self) -> str:
        """The template in the file."""
        return (self._library.llama_model_chat_template(self._model, None) or b"").decode()

    @property
    def eos_id(self) -> int:
        """The token that ends a text."""
        return int(self._library.llama_vocab_eos(self._vocab))
