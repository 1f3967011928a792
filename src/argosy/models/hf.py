"""Export to and import from Hugging Face folders: config and weights. The classes are those of `hf_families`."""

from __future__ import annotations

import json
import math
import shutil
import stat
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from argosy.config.model import ModelConfig
from argosy.errors import ArgosyWarning, StorageError, UserError
from argosy.files import commit_folder, is_plain_name, read_at_most
from argosy.models.hf_config import config_from_json, config_to_json
from argosy.models.hf_families import family_of
from argosy.models.hf_layers import refuse
from argosy.models.hf_names import Conversion, pieces_of, their_shapes
from argosy.plan.mup import folded_factor
from argosy.plan.parameters import state_table

MOST_JSON_BYTES = 256 * 2**20
"""No config or index is larger: that of 671B parameters has 9 MB."""
SHARD_BYTES = 5 * 10**9
"""About how many bytes of weights go into one safetensors file."""
KEPT_IN_FP32 = "router.bias"
"""bf16 would round steps of bias_rate away."""


# Out


def export_folder(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    out: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    tokenizer: Path | None = None,
    eod_id: int | None = None,
    usage: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write a folder that transformers (4.43 and newer), vLLM and others load; whole or not at all.

    `weights`: by our names; a lazy mapping is read one file's worth at a time.
    `tokenizer`: a tokenizer.json to put beside them.
    `eod_id`: the token that ends a document; generation stops at it.
    `usage`: files that say how the tokenizer is used, in place of those that are written here.

    The multipliers of `model.mup` are folded into the weights, which the classes then compute the same with.

    Raises: UserError if `out` exists, or the model is not one that the family's class can express; StorageError if it
    cannot be written.
    """
    if out.exists():
        raise UserError(f"{out} exists already. Choose another folder, or remove it first.")
    shapes = _shapes(config)
    _check_names(weights.keys(), shapes.keys(), "the weights to export")
    described = config_to_json(config, dtype=dtype, eod_id=eod_id)
    partial = out.with_name(f".{out.name}.partial")  # a sibling: the rename stays on one file system
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write_json(partial / "config.json", described)
        ends = {"bos_token_id": None, "eos_token_id": eod_id, "pad_token_id": eod_id}
        _write_json(partial / "generation_config.json", ends)
        if tokenizer is not None:
            _write_tokenizer(partial, tokenizer, eod_id, config)
        for name, text in usage.items():
            (partial / name).write_bytes(text)
        _write_weights(partial, weights, config, shapes, dtype)
        commit_folder(partial, out)
    except (OSError, SafetensorError) as problem:
        raise StorageError(
            f"{out} could not be written ({problem}). Free some space or get the right to write there, or choose "
            "another folder."
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_weights(
    folder: Path,
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> None:
    pieces = pieces_of(config)
    sizes = [sum(math.prod(shapes[name]) for name in piece.ours) * dtype.itemsize for piece in pieces]
    shards = _shards(pieces, sizes)
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = ["model.safetensors"]
    for file, some in zip(files, shards, strict=True):
        tensors: dict[str, Tensor] = {}
        for piece in some:
            ours = [_to_store(name, weights[name], config, shapes[name], dtype) for name in piece.ours]
            parts = piece.to_theirs(ours)
            # A file has no use for two tensors in the same memory, and safetensors refuses them.
            copies = (part.clone() if len(parts) > 1 else part.contiguous() for part in parts)
            tensors |= dict(zip(piece.theirs, copies, strict=True))
        _save(tensors, folder / file)
    if len(shards) > 1:
        where = {
            name: file for file, some in zip(files, shards, strict=True) for piece in some for name in piece.theirs
        }
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": where}
        _write_json(folder / "model.safetensors.index.json", index)


def _to_store(name: str, weight: Tensor, config: ModelConfig, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return one of our weights on the CPU, as it is to be stored."""
    _check_shape(name, weight.shape, shape, "the weights to export")
    if (factor := folded_factor(name, config)) != 1.0:
        shift = float(config.norms.zero_centered and "norm" in name)
        weight = (weight + shift) * factor - shift
    return weight.detach().to("cpu", torch.float32 if name.endswith(KEPT_IN_FP32) else dtype)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file that has the rights of any new file: safetensors writes one that only its owner may read."""
    path.touch()
    rights = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(stat.S_IMODE(rights))


def _shards(pieces: Sequence[Conversion], sizes: Sequence[int]) -> list[list[Conversion]]:
    """Split the pieces, in their order, into shards of at most SHARD_BYTES; a larger one has a shard of its own."""
    shards: list[list[Conversion]] = [[]]
    room = SHARD_BYTES
    for piece, size in zip(pieces, sizes, strict=True):
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(piece)
        room -= size
    return shards


def _write_tokenizer(folder: Path, file: Path, eod_id: int | None, config: ModelConfig) -> None:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception, for a missing file too
        raise UserError(f"{file} cannot be read as a tokenizer: {error}. Give a tokenizer.json.") from None
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise UserError(
            f"{file} has {tokenizer.get_vocab_size()} tokens and model.vocab_size = {config.vocab_size}. "
            f"Give the tokenizer that the model was trained with."
        )
    eod = None if eod_id is None else tokenizer.id_to_token(eod_id)
    if eod_id is not None and eod is None:
        raise UserError(f"{file} has no token {eod_id} to end documents with. Give the model's own tokenizer.")
    shutil.copyfile(file, folder / "tokenizer.json")
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_seq_len,
        "clean_up_tokenization_spaces": False,
        **({} if eod is None else {"eos_token": eod, "pad_token": eod}),
    }
    _write_json(folder / "tokenizer_config.json", described)
    if (split := family_of(config.family).own_split) and not _splits_by(tokenizer, split):
        warnings.warn(
            f"{file}: AutoTokenizer of transformers splits text in its own way for {config.family} models, and would "
            "give other tokens than this tokenizer. Load it with PreTrainedTokenizerFast.from_pretrained.",
            ArgosyWarning,
            stacklevel=1,
        )


def _splits_by(tokenizer: Tokenizer, split: str) -> bool:
    """Return True if the tokenizer normalizes to NFC and splits text by this pattern."""
    record = json.loads(tokenizer.to_str())
    return (record["normalizer"] or {}).get("type") == "NFC" and json.dumps(split) in json.dumps(record)


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# In


class StoredTensor(NamedTuple):
    """The place of a weight in a file, read from the file's header alone."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


class FolderWeights(Mapping[str, Tensor]):
    """Weights by our names. Each is read from its file when it is asked for; what was fused with it is kept until
    something else is."""

    def __init__(self, pieces: Sequence[Conversion], stored: Mapping[str, StoredTensor]):
        self._pieces = {name: piece for piece in pieces for name in piece.ours}
        self._stored = stored
        self._last: tuple[Conversion, dict[str, Tensor]] | None = None

    def __getitem__(self, name: str) -> Tensor:
        piece = self._pieces[name]
        if self._last is None or self._last[0] is not piece:
            self._last = None  # before the next is read: only one is in memory
            ours = piece.to_ours([_read(self._stored[theirs]) for theirs in piece.theirs])
            self._last = piece, dict(zip(piece.ours, ours, strict=True))
        tensor = self._last[1].pop(name, None)
        if not self._last[1]:
            self._last = None
        return self[name] if tensor is None else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


def _read(at: StoredTensor) -> Tensor:
    with safe_open(at.file, framework="pt") as file:
        tensor: Tensor = file.get_tensor(at.name)
        return tensor


def import_config(path: Path) -> ModelConfig:
    """Return the model that a Hugging Face folder, or its config.json, describes. Raises: UserError."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file} is not there. Give a Hugging Face folder: config.json and *.safetensors.")
    return config_from_json(_read_json(file), file)


def import_folder(folder: Path) -> tuple[ModelConfig, FolderWeights]:
    """Open the model in a Hugging Face folder; its weights stay in the stored dtype.

    Every name and shape is checked from the files' headers before this returns; weights are read on demand.

    Raises: UserError, naming file, key and value, for a model that our decoder would compute differently.
    """
    config = import_config(folder)
    stored = {weight.name: weight for path in _weight_files(folder) for weight in _stored_in(path)}
    shapes = _shapes(config)
    # Old Llama folders store frequencies, which config.json gives too; some folders store a tied head twice.
    known = {n: w for n, w in stored.items() if not n.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings:
        known.pop("lm_head.weight", None)
    if skipped := family_of(config.family).skipped:
        known = {n: w for n, w in known.items() if not n.startswith(skipped.format(layers=config.layers))}
    pieces = pieces_of(config)
    _check_names(known.keys(), {name for piece in pieces for name in piece.theirs}, str(folder))
    for piece in pieces:
        for name, shape in zip(piece.theirs, their_shapes(piece, shapes), strict=True):
            part = known[name]
            _check_shape(part.name, part.shape, shape, str(part.file))
            if part.dtype not in ("F64", "F32", "F16", "BF16"):
                refuse(part.file, part.name, part.dtype, "quantized weights cannot be trained on")
    return config, FolderWeights(pieces, known)


def _weight_files(folder: Path) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    files = [folder / name for name in _names_in(index)] if index.is_file() else [single]
    for file in files:
        if not file.is_file():
            bins = any(folder.glob("*.bin"))
            remedy = "Save the *.bin weights as safetensors first" if bins else "Get the whole folder"
            raise UserError(f"{file} is not there. {remedy}.")
    return files


def _names_in(index: Path) -> list[str]:
    """Return the files that an index names. Raises: UserError if one is not the name of a file beside it."""
    places = _read_json(index).get("weight_map", {})
    names = set(map(str, places.values())) if isinstance(places, dict) else {str(places)}
    for name in names:
        if not is_plain_name(name):
            raise UserError(f"{index}: {name[:60]!r} in weight_map is not the name of a file in {index.parent}.")
    return sorted(names)


def _stored_in(path: Path) -> list[StoredTensor]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
            return [StoredTensor(path, n, tuple(s.get_shape()), s.get_dtype()) for n, s in slices.items()]
    except SafetensorError as error:
        raise UserError(f"{path} is not safetensors: {error}. Download or export it again.") from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_at_most(file, MOST_JSON_BYTES).decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON: {error}. Download or export it again.") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} is not a JSON object. Download or export it again.")
    return value


# Both


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {name: parameter.shape for name, parameter in state_table(config).items()}


def _check_names(found: Collection[str], expected: Collection[str], where: str) -> None:
    """Raise UserError if weights are missing or unknown."""
    if missing := set(expected) - set(found):
        hint = " Should tie_word_embeddings be true?" if missing == {"lm_head.weight"} else ""
        raise UserError(f"{where}: missing {_some(missing)}.{hint} Get the whole model.")
    if extra := set(found) - set(expected):
        raise UserError(f"{where}: {_some(extra)} has no place in this model. Check the config against it.")


def _check_shape(name: str, found: Sequence[int], expected: Sequence[int], where: str) -> None:
    if tuple(found) != tuple(expected):
        raise UserError(
            f"{where}: {name} has shape {list(found)}, and the config asks for {list(expected)}. "
            f"Check the config against the weights."
        )


def _some(names: Iterable[str]) -> str:
    first, *rest = sorted(names)
    return f"{first} and {len(rest)} more" if rest else first
