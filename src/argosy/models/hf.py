"""Export to and import from Hugging Face folders: config and weights. The classes are those of `hf_families`.

Both go tensor by tensor: of a model of any size, a tensor or two are in memory.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor

from argosy.config.model import ModelConfig
from argosy.data.chat_template import TOKENIZER_CONFIG
from argosy.data.stores.model_folder import ADAPTER_CONFIG, Destination, ModelFolder, model_folder, new_folder
from argosy.data.tokenizer import text_vocabulary
from argosy.errors import ArgosyWarning, UserError, some_of
from argosy.files import is_plain_name, json_of, read_at_most
from argosy.models.hf_config import config_from_json, config_to_json, is_same_model
from argosy.models.hf_families import family_of
from argosy.models.hf_family import TENSOR_NAMES
from argosy.models.hf_layers import refuse
from argosy.models.hf_names import Conversion, conversions_of, copies_of, their_shapes
from argosy.models.lazy_weights import FolderWeights, HeldWeights, LazyWeights, check_sizes, check_tied
from argosy.models.quantised import Stored, WeightCompression, compressed, dequantised
from argosy.models.tensor_file import StoredTensor, TensorToWrite, read_header, write_tensors
from argosy.plan.mup import folded_factor
from argosy.plan.parameters import state_table

HF_CONFIG, HF_INDEX, HF_SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
MOST_CONFIG_BYTES = 256 * 2**20
"""No config or index is larger: that of 671B parameters has 9 MB."""
SHARD_BYTES = 5 * 10**9
"""About how many bytes of weights go into one safetensors file."""
KEPT_IN_FP32 = "router.bias"
"""bf16 would round steps of bias_rate away."""
HEADERS_AT_ONCE = 8
"""Files whose headers are read at once: a store takes its time for each."""
CHECKED_SAMPLES, SAMPLE_BYTES = 16, 64 * 2**10
"""The parts of each file that tell a folder's weights from others."""
QUANTIZATION = "quantization_config"


# Out


def export_folder(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    out: str | Path,
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    tokenizer: Path | None = None,
    eod_id: int | None = None,
    pad_id: int | None = None,
    usage: Mapping[str, bytes] = MappingProxyType({}),
    compression: WeightCompression | None = None,
) -> None:
    """Write a folder that transformers (4.43 and newer), vLLM and others load; whole or not at all.

    `weights`: by our names; lazy ones (`LazyWeights`) are read tensor by tensor. `out`: a folder, or its URL in a
    store.
    `dtype`: None keeps that of each weight.
    `tokenizer`: a tokenizer.json to put beside them.
    `eod_id`: the token that ends a document; generation stops at it. `pad_id`: fills the rows of a reward model.
    `usage`: files that the weights came with. They say how the tokenizer is used; config.json is written as it is there
    if it describes this model, and the index says which file a tensor goes to if it names the same tensors.
    `compression`: how the weights of linear layers are stored in fewer bits; the others keep `dtype`.

    The multipliers of `model.mup` are folded into the weights, which the classes then compute the same with.

    Raises: UserError if `out` exists, or the model is not one that the family's class can express; StorageError if it
    cannot be written.
    """
    source = weights if isinstance(weights, LazyWeights) else HeldWeights(weights)
    shapes = _shapes(config)
    _check_names(source.keys(), shapes.keys(), "the weights to export")
    for name in shapes:
        _check_shape(name, source.shape(name), shapes[name], "the weights to export")
    described = config_to_json(config, dtype=dtype or torch.float32, eod_id=eod_id, pad_id=pad_id)
    tensors = dict(tensors_to_write(source, config, shapes, dtype))
    described = _described(config, described, tensors, usage)
    if compression is not None:
        tensors, settings = compressed(config, tensors, compression)
        described |= {QUANTIZATION: settings}
    files = {name: data for name, data in usage.items() if name not in (HF_CONFIG, HF_INDEX)}
    if tokenizer is not None:
        files = _tokenizer_files(tokenizer, eod_id, config) | files
    if HF_CONFIG not in usage:
        ends = {"bos_token_id": None, "eos_token_id": eod_id, "pad_token_id": eod_id}
        files = {"generation_config.json": _json(ends)} | files
    elif TOKENIZER_CONFIG not in usage:  # what its authors did without stays away
        files.pop(TOKENIZER_CONFIG, None)
    with new_folder(out) as folder:
        index = write_weights(folder, tensors, usage.get(HF_INDEX))
        files |= {} if index is None else {HF_INDEX: index}
        for name, data in {**files, HF_CONFIG: _bytes_of(described, usage)}.items():
            with folder.file(name) as sink:
                sink.write(data)


def tensors_to_write(
    source: LazyWeights, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype | None
) -> Iterator[tuple[str, TensorToWrite]]:
    """Yield their tensors, in the order of ours."""
    for conversion in conversions_of(config):
        first = conversion.ours[0]
        theirs = dtype or source.dtype(first)
        if dtype is not None and first.endswith(KEPT_IN_FP32):
            theirs = torch.float32
        for row, (name, shape) in enumerate(zip(conversion.theirs, their_shapes(conversion, shapes), strict=True)):
            yield name, TensorToWrite(shape, theirs, partial(_parts, source, config, conversion, row, theirs))


def _parts(
    source: LazyWeights, config: ModelConfig, conversion: Conversion, row: int, dtype: torch.dtype
) -> Iterator[Tensor]:
    if conversion.rows == "theirs":
        yield folded_weight(conversion.ours[0], source.rows(conversion.ours[0], row, 1), config, dtype)[0]
    elif conversion.rows == "alone":
        of_each = (source.in_parts(name) for name in conversion.ours)
        for some in zip(*of_each, strict=True):
            ours = [folded_weight(name, part, config, dtype) for name, part in zip(conversion.ours, some, strict=True)]
            yield conversion.to_theirs(ours)[0]
    else:
        yield conversion.to_theirs([folded_weight(name, source[name], config, dtype) for name in conversion.ours])[row]


def folded_weight(name: str, weight: Tensor, config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """Return a weight, or rows of it, with the multipliers of `model.mup` folded in."""
    if (factor := folded_factor(name, config)) != 1.0:
        # The factor of such a norm is one plus the weight.
        shift = float(config.norms.zero_centered and name.endswith("norm.weight"))
        weight = (weight + shift) * factor - shift
    return weight.to(dtype)


def write_weights(folder: Destination, tensors: Mapping[str, TensorToWrite], index: bytes | None) -> bytes | None:
    """Write the files of weights. Returns the index, if there is more than one."""
    places = _places(tensors, index)
    files: dict[str, dict[str, TensorToWrite]] = {}
    for name, tensor in tensors.items():
        files.setdefault(places[name], {})[name] = tensor
    for file, some in sorted(files.items()):
        with folder.file(file) as sink:
            write_tensors(sink, some, {"format": "pt"})
    total = sum(tensor.bytes for tensor in tensors.values())
    if set(files) == {HF_SINGLE}:
        return None
    before = {} if index is None else table_of(index, HF_INDEX)
    if index is not None and before.get("weight_map") == places and _total(before) == total:
        return index
    return _json({"metadata": {"total_size": total}, "weight_map": places})


def _total(index: Mapping[str, Any]) -> object:
    metadata = index.get("metadata")
    return metadata.get("total_size") if isinstance(metadata, dict) else None


def _places(tensors: Mapping[str, TensorToWrite], index: bytes | None) -> dict[str, str]:
    """Return the file of each tensor: as in the index, if it names the same ones; else by size."""
    if index is not None:
        given = _weight_map(index, HF_INDEX)
        if given.keys() == tensors.keys():
            return given
    numbers, file, room = dict[str, int](), 1, SHARD_BYTES
    for name, tensor in tensors.items():  # a larger one has a file of its own
        if tensor.bytes > room and room < SHARD_BYTES:
            file, room = file + 1, SHARD_BYTES
        numbers[name] = file
        room -= tensor.bytes
    return {name: HF_SINGLE if file == 1 else f"model-{n:05}-of-{file:05}.safetensors" for name, n in numbers.items()}


def _described(
    config: ModelConfig, plain: dict[str, Any], tensors: Mapping[str, TensorToWrite], usage: Mapping[str, bytes]
) -> dict[str, Any]:
    """Return config.json: that of `usage`, if it describes this model; else `plain`. It says the tensors' dtype."""
    sizes = Counter[torch.dtype]()
    for tensor in tensors.values():
        sizes[tensor.dtype] += tensor.bytes
    dtype = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
    given = plain
    if HF_CONFIG in usage:
        theirs = table_of(usage[HF_CONFIG], HF_CONFIG)
        said = config_from_json(theirs, HF_CONFIG)
        said = said if config.mtp.modules else said.without_further()  # `_further_of` may have left its modules out
        given = theirs if is_same_model(said, config) else plain
    return {k: dtype if k in ("torch_dtype", "dtype") else v for k, v in given.items() if k != QUANTIZATION}


def _tokenizer_files(file: Path, eod_id: int | None, config: ModelConfig) -> dict[str, bytes]:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception, for a missing file too
        raise UserError(f"{file} cannot be read as a tokenizer: {error}. Give a tokenizer.json.") from None
    if (tokens := text_vocabulary(tokenizer)) > config.vocab_size:
        sizes = f"{file} has {tokens} tokens and model.vocab_size = {config.vocab_size}"
        raise UserError(f"{sizes}. Give the tokenizer that the model was trained with.")
    eod = None if eod_id is None else tokenizer.id_to_token(eod_id)
    if eod_id is not None and eod is None:
        raise UserError(f"{file} has no token {eod_id} to end documents with. Give the model's own tokenizer.")
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_seq_len,
        "clean_up_tokenization_spaces": False,
        **({} if eod is None else {"eos_token": eod, "pad_token": eod}),
    }
    if (split := family_of(config.family).text_split) and not _splits_by(tokenizer, split):
        warnings.warn(
            f"{file}: AutoTokenizer of transformers splits text in its own way for {config.family} models, and would "
            "give other tokens than this tokenizer. Load it with PreTrainedTokenizerFast.from_pretrained.",
            ArgosyWarning,
            stacklevel=1,
        )
    return {"tokenizer.json": read_at_most(file, MOST_CONFIG_BYTES), TOKENIZER_CONFIG: _json(described)}


def _splits_by(tokenizer: Tokenizer, split: str) -> bool:
    """Return True if the tokenizer normalizes to NFC and splits text by this pattern."""
    record = json.loads(tokenizer.to_str())
    return (record["normalizer"] or {}).get("type") == "NFC" and json.dumps(split) in json.dumps(record)


def _bytes_of(described: Mapping[str, Any], usage: Mapping[str, bytes]) -> bytes:
    """Return config.json as `usage` has it, byte for byte, if that says the same."""
    same = HF_CONFIG in usage and json.loads(usage[HF_CONFIG]) == described
    return usage[HF_CONFIG] if same else _json(described)


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


# In


def import_config(place: str | Path, named: str = "") -> ModelConfig:
    """Return the model that a Hugging Face folder, its URL or its config.json describes.

    named: what stands before a URL in messages. Raises: UserError.
    """
    if isinstance(place, Path) and place.suffix == ".json":
        folder, name = model_folder(place.parent), place.name
    else:
        folder, name = model_folder(place, named), HF_CONFIG
    return config_from_json(_config_of(folder, name), folder.where(name))


def _config_of(folder: ModelFolder, name: str = HF_CONFIG) -> dict[str, Any]:
    if folder.size(name) is None:
        remedy = "Give a Hugging Face folder, or hf://OWNER/NAME."
        if folder.size(ADAPTER_CONFIG) is not None:
            remedy = "An adapter alone is: argosy checkpoint import FOLDER --base WEIGHTS --out RUN joins both."
        raise UserError(f"{folder.where(name)} is not there. {remedy}")
    return table_of(folder.content(name, MOST_CONFIG_BYTES), folder.where(name))


def import_folder(place: str | Path, named: str = "") -> tuple[ModelConfig, FolderWeights]:
    """Open the model in a Hugging Face folder, or at its URL; its weights stay in the stored dtype, quantised ones
    become bf16.

    Every name and shape is checked from the files' headers before this returns; weights are read on demand.
    named: what stands before a URL in messages.

    Raises: UserError, naming file, key and value, for a model that our decoder would compute differently.
    """
    folder = model_folder(place, named)
    values = _config_of(folder)
    config = config_from_json(values, folder.where(HF_CONFIG))
    stored = dequantised(stored_in(folder), values.get(QUANTIZATION) or {})
    # Old Llama folders store frequencies, which config.json gives too; some store a tied head twice, or it alone.
    known = {n: w for n, w in stored.items() if not n.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings and (head := known.pop("lm_head.weight", None)) is not None:
        check_tied(known.setdefault("model.embed_tokens.weight", head), head, folder.where(HF_CONFIG))
    if skipped := family_of(config.family).skipped:
        known = {n: w for n, w in known.items() if not n.startswith(skipped)}
    config, known = _further_of(config, known, folder)
    shapes = _shapes(config)
    check_sizes(shapes, known.values(), folder.where(HF_CONFIG))
    conversions = conversions_of(config)
    _check_names(known.keys(), {name for conversion in conversions for name in conversion.theirs}, folder.name)
    for conversion in conversions:
        for name, shape in zip(conversion.theirs, their_shapes(conversion, shapes), strict=True):
            part = known[name]
            _check_shape(part.name, part.shape, shape, part.file)
            if part.code not in ("F64", "F32", "F16", "BF16"):
                refuse(part.file, part.name, part.code, f"quantized, and {HF_CONFIG} has no {QUANTIZATION} for it")
    if method := (values.get(QUANTIZATION) or {}).get("quant_method"):
        warnings.warn(
            f"{folder.name}: the weights are in {method}, and are dequantised to bf16: {QUANTIZATION} is left out.",
            ArgosyWarning,
            stacklevel=2,
        )
    return config, FolderWeights(conversions, known, shapes)


def weights_sha256(place: str | Path) -> str:
    """Return a SHA-256 that tells the weights in a Hugging Face folder, or at its URL, from others: of the names, sizes
    and `CHECKED_SAMPLES` parts of their files. All of the bytes would take minutes.

    Raises: UserError, as `import_folder`.
    """
    folder = model_folder(place, "model.weights = ")

    def sampled(file: str) -> bytes:
        size = folder.size(file)
        assert size is not None
        block = bytearray(min(size, SAMPLE_BYTES))
        digest = hashlib.sha256(f"{file} {size}".encode())
        for number in range(CHECKED_SAMPLES):
            folder.read_into(file, number * (size - len(block)) // (CHECKED_SAMPLES - 1), memoryview(block))
            digest.update(block)
        return digest.digest()

    with ThreadPoolExecutor(HEADERS_AT_ONCE) as pool:
        return hashlib.sha256(b"".join(pool.map(sampled, _files_of(folder)[0]))).hexdigest()


def _further_of(
    config: ModelConfig, known: dict[str, Stored], folder: ModelFolder
) -> tuple[ModelConfig, dict[str, Stored]]:
    """Return the config and the weights without modules of multi-token prediction that only one of them has.

    transformers leaves their weights out of what it saves. Copies of embedding and head that are not stored are those.
    """
    family, first = family_of(config.family), f"model.layers.{config.layers}."
    if not family.copies:
        return config, known
    if not config.mtp.modules:
        return config, {n: w for n, w in known.items() if not n.startswith(first)}
    if not any(name.startswith(first) for name in known):
        warnings.warn(
            f"{folder.name}: config.json says num_nextn_predict_layers = {config.mtp.modules}, and there are no "
            "weights of such modules: the model is taken without them.",
            ArgosyWarning,
            stacklevel=1,
        )
        return config.without_further(), known
    names = TENSOR_NAMES | family.names
    for ours in family.copies:
        module, _, kind = ours.rpartition(".")
        original = known.get(f"{names[module]}.{kind}")
        copies = copies_of(ours, config)
        if ours == "head.weight" and config.tie_embeddings:
            known = {n: w for n, w in known.items() if n not in copies}
        elif original is not None:
            known |= {name: original for name in copies if name not in known}
    return config, known


def _files_of(folder: ModelFolder) -> tuple[list[str], dict[str, str]]:
    """Return the files with a folder's weights, and which tensor the index says is where. Raises: UserError."""
    places, files = dict[str, str](), [HF_SINGLE]
    if folder.size(HF_SINGLE) is None and folder.size(HF_INDEX) is not None:  # else it was left by an earlier save
        places = _weight_map(folder.content(HF_INDEX, MOST_CONFIG_BYTES), folder.where(HF_INDEX))
        files = sorted(set(places.values()))
    for file in files:
        if folder.size(file) is None:
            keys = sorted(name for name, place in places.items() if place == file)
            named = f"{folder.where(HF_INDEX)} says that {_some(keys)} is in {file}, and " if keys else ""
            bins = any(name.endswith(".bin") for name in folder.names())
            remedy = "Save the *.bin weights as safetensors first" if bins else "Get the whole folder"
            raise UserError(f"{named}{folder.where(file)} is not there. {remedy}.")
    return files, places


def stored_in(folder: ModelFolder) -> dict[str, StoredTensor]:
    """Return what the files of a folder hold, from their headers. Raises: UserError."""
    files, places = _files_of(folder)
    with ThreadPoolExecutor(HEADERS_AT_ONCE) as pool:
        found = dict(zip(files, pool.map(partial(_header_of, folder), files), strict=True))
    for name, file in places.items():
        if name not in found[file]:
            raise UserError(
                f"{folder.where(HF_INDEX)} says that {name[:200]} is in {file}, which does not hold it. Get the whole "
                "folder again."
            )
    return {name: tensor for some in found.values() for name, tensor in some.items()}


def _header_of(folder: ModelFolder, file: str) -> dict[str, StoredTensor]:
    size = folder.size(file)
    assert size is not None
    try:
        return read_header(folder.where(file), size, partial(folder.read_into, file))[0]
    except SafetensorError as error:
        raise UserError(f"{folder.where(file)} is not safetensors: {error}. Download or export it again.") from None


def _weight_map(index: bytes, where: str) -> dict[str, str]:
    """Return the file of each tensor. Raises: UserError if one is not the name of a file beside the index."""
    places = table_of(index, where).get("weight_map", {})
    if not isinstance(places, dict):
        raise UserError(f"{where}: weight_map is no table of names and files. Download it again.")
    for name in places.values():
        if not is_plain_name(str(name)):
            raise UserError(f"{where}: {str(name)[:60]!r} in weight_map is not the name of a file beside it.")
    return {str(name): str(file) for name, file in places.items()}


def table_of(data: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in a file of a model. Raises: UserError."""
    try:
        value = json_of(data.decode())
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}. Download or export it again.") from None
    if not isinstance(value, dict):
        raise UserError(f"{where} is not a JSON object. Download or export it again.")
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
    return some_of(sorted(names), 1)
