"""Decoders to and from Hugging Face folders: `LlamaForCausalLM` and `Qwen3ForCausalLM`, sizes and weights."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from argosy.config.schema import ModelConfig, RopeScaling
from argosy.errors import UserError
from argosy.models.decoder import Decoder
from argosy.models.rope import attention_scale

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""`ModelConfig.family`, which is also their `model_type` -> their class."""

MODULES = {
    "embedding": "model.embed_tokens",
    "blocks.*.attention_norm": "model.layers.*.input_layernorm",
    "blocks.*.attention.q": "model.layers.*.self_attn.q_proj",
    "blocks.*.attention.k": "model.layers.*.self_attn.k_proj",
    "blocks.*.attention.v": "model.layers.*.self_attn.v_proj",
    "blocks.*.attention.o": "model.layers.*.self_attn.o_proj",
    "blocks.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
    "blocks.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
    "blocks.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "blocks.*.mlp.gate": "model.layers.*.mlp.gate_proj",
    "blocks.*.mlp.up": "model.layers.*.mlp.up_proj",
    "blocks.*.mlp.down": "model.layers.*.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
"""Our module -> theirs; * is the block's number. Both lay rotary pairs out as halves, so values stay."""

KEYS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "ffn_width": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "attention_bias": "attention_bias",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
"""Field of `ModelConfig` -> key of config.json, where the value is the same."""

ROPE_KEYS = {
    "none": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_seq_len": "original_max_position_embeddings",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_max_seq_len": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
    },
}
"""`RopeScaling.kind` -> its fields -> their keys. Their name for "none" is "default"."""

COMMON_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": COMMON_DEFAULTS | {"max_position_embeddings": 2048},
    "qwen3": COMMON_DEFAULTS | {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
"""What transformers takes for a key that config.json leaves out; sizes without a default must be there."""

SHARD_BYTES = 5 * 10**9
"""Weights per safetensors file, about."""


def their_name(name: str) -> str:
    """`blocks.3.attention.q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    module, _, kind = name.rpartition(".")
    block = module.split(".")[1] if module.startswith("blocks.") else ""
    pattern = module.replace(f".{block}.", ".*.", 1) if block else module
    return f"{MODULES[pattern].replace('*', block)}.{kind}"


# Out


def export_folder(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    out: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    tokenizer: Path | None = None,
    eod_id: int | None = None,
) -> None:
    """Write the folder that transformers (4.43 and newer), vLLM and others load; whole or not at all.

    `weights`: by our names; a lazy mapping is read one file's worth at a time.
    `tokenizer`: a tokenizer.json to put beside them.
    `eod_id`: the token that ends a document; generation stops at it.

    Raises: UserError if `out` exists, or the model is not one that the family's class can express.
    """
    if out.exists():
        raise UserError(f"{out} exists already. Choose another folder, or remove it first.")
    shapes = _shapes(config)
    _check_names(weights.keys(), shapes.keys(), "the weights to export")
    described = config_to_json(config, dtype=dtype, eod_id=eod_id)
    partial = out.with_name(f".{out.name}.partial")  # a sibling: the rename stays on one file system
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_json(partial / "config.json", described)
        ends = {"bos_token_id": None, "eos_token_id": eod_id, "pad_token_id": eod_id}
        _write_json(partial / "generation_config.json", ends)
        if tokenizer is not None:
            _write_tokenizer(partial, tokenizer, eod_id, config)
        _write_weights(partial, weights, shapes, dtype)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def config_to_json(config: ModelConfig, *, dtype: torch.dtype, eod_id: int | None) -> dict[str, Any]:
    """What config.json says. Raises: UserError if the family's class has no way to say it."""
    if config.qk_norm != (config.family == "qwen3"):
        raise UserError(
            f"model.qk_norm = {str(config.qk_norm).lower()} and model.family = {config.family}: "
            f"Qwen3 has norms on queries and keys, Llama has none. "
            f'Export with family = "{"qwen3" if config.qk_norm else "llama"}".'
        )
    if config.family == "llama" and config.width % config.heads:
        raise UserError(
            f"model.width = {config.width} is not a multiple of model.heads = {config.heads}, which "
            f"LlamaForCausalLM refuses whatever head_width is. Choose sizes that divide, or the family qwen3."
        )
    scaling = config.rope_scaling
    rope = {theirs: getattr(scaling, ours) for ours, theirs in ROPE_KEYS[scaling.kind].items()}
    return {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        **{theirs: getattr(config, ours) for ours, theirs in KEYS.items()},
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        # transformers 4 reads only these two keys, and 5 reads them as well as its own `rope_parameters`.
        "rope_theta": config.rope_theta,
        "rope_scaling": {"rope_type": scaling.kind, **rope} if rope else None,
        "bos_token_id": None,
        "eos_token_id": eod_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
    }


def _write_weights(
    folder: Path, weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> None:
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    shards = _shards(sizes)
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = ["model.safetensors"]
    for file, names in zip(files, shards, strict=True):
        tensors = {}
        for name in names:
            weight = weights[name]
            _check_shape(name, weight.shape, shapes[name], "the weights to export")
            tensors[their_name(name)] = weight.detach().to("cpu", dtype).contiguous()
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        where = {their_name(n): file for file, names in zip(files, shards, strict=True) for n in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        _write_json(folder / "model.safetensors.index.json", index)


def _shards(sizes: Mapping[str, int]) -> list[list[str]]:
    """The names in their order, cut before a shard would grow past SHARD_BYTES."""
    shards: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    return shards


def _write_tokenizer(folder: Path, file: Path, eod_id: int | None, config: ModelConfig) -> None:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception, for a missing file too
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


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# In


class StoredTensor(NamedTuple):
    """Where a weight lies, known from the file's header alone."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


class FolderWeights(Mapping[str, Tensor]):
    """Weights by our names; each is read from its file when it is asked for, and not kept."""

    def __init__(self, stored: Mapping[str, StoredTensor]):
        self._stored = stored

    def __getitem__(self, name: str) -> Tensor:
        at = self._stored[name]
        with safe_open(at.file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(at.name)
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def import_folder(folder: Path) -> tuple[ModelConfig, FolderWeights]:
    """The model in a Hugging Face folder; its weights stay in the stored dtype.

    Every name and shape is checked before this returns, from the files' headers; weights are read on demand.

    Raises: UserError, naming file, key and value, for a model that our decoder would compute differently.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"{file} is not there. Give a Hugging Face folder: config.json and *.safetensors.")
    config = config_from_json(_read_json(file), file)
    stored = {weight.name: weight for path in _weight_files(folder) for weight in _stored_in(path)}
    shapes = _shapes(config)
    # Old Llama folders store frequencies, which config.json gives as well; some store a tied head twice.
    known = {n: w for n, w in stored.items() if not n.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings:
        known.pop("lm_head.weight", None)
    _check_names(known.keys(), {their_name(name) for name in shapes}, str(folder))
    ours = {name: known[their_name(name)] for name in shapes}
    for name, weight in ours.items():
        _check_shape(weight.name, weight.shape, shapes[name], str(weight.file))
        if weight.dtype not in ("F64", "F32", "F16", "BF16"):
            _refuse(weight.file, weight.name, weight.dtype, "quantized weights cannot be trained on")
    return config, FolderWeights(ours)


def config_from_json(values: Mapping[str, Any], file: Path) -> ModelConfig:
    """The `ModelConfig` of a config.json, read from `file`. Raises: UserError."""
    family = _family(values, file)
    given = DEFAULTS[family] | {key: value for key, value in values.items() if value is not None}
    _refuse_what_differs(given, file)
    for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size"):
        if key not in given:
            raise UserError(f"{file}: {key} is missing. Add it, as the model's authors give it.")
    given.setdefault("num_key_value_heads", given["num_attention_heads"])
    given.setdefault("head_dim", given["hidden_size"] // given["num_attention_heads"])
    theta, scaling = _rope_from_json(given, file)
    try:
        return ModelConfig(
            family=family,
            qk_norm=family == "qwen3",
            rope_theta=theta,
            rope_scaling=RopeScaling.model_validate(scaling),
            **{ours: given[theirs] for ours, theirs in KEYS.items()},
        )
    except ValidationError as error:
        theirs = KEYS | ROPE_KEYS["llama3"] | ROPE_KEYS["yarn"]
        lines = [
            f"{file}: {' '.join(theirs.get(str(k), str(k)) for k in e['loc']) or 'sizes'}: {e['msg']} "
            f"(config.json says {e['input'] if e['loc'] else 'otherwise'}). Is the file the authors' own?"
            for e in error.errors()
        ]
        raise UserError("\n".join(lines)) from None


def _family(values: Mapping[str, Any], file: Path) -> str:
    family, classes = values.get("model_type"), values.get("architectures") or []
    known = ", ".join(f"{name} ({its_class})" for name, its_class in ARCHITECTURES.items())
    if family == "qwen2":
        _refuse(file, "model_type", family, f"Qwen2 has biases on q, k, v and none on o; known are {known}")
    if family not in ARCHITECTURES:
        _refuse(file, "model_type", family, f"this architecture is not known; known are {known}")
    if classes and ARCHITECTURES[family] not in classes:
        _refuse(file, "architectures", classes, f"this architecture is not known; known are {known}")
    return str(family)


def _refuse_what_differs(given: Mapping[str, Any], file: Path) -> None:
    """Keys that change what the model computes, beyond what our decoder can do."""
    if "quantization_config" in given:
        method = given["quantization_config"].get("quant_method", "of an unnamed kind")
        _refuse(file, "quantization_config", method, "quantized weights cannot be trained on")
    if given.get("hidden_act", "silu") != "silu":
        _refuse(file, "hidden_act", given["hidden_act"], "our feed-forward is SwiGLU (silu)")
    if given.get("mlp_bias"):
        _refuse(file, "mlp_bias", True, "our feed-forward has no biases")
    if given.get("use_sliding_window") or "sliding_attention" in given.get("layer_types", ()):
        _refuse(file, "use_sliding_window", True, "our attention reads the whole document")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        _refuse(file, "partial_rotary_factor", given["partial_rotary_factor"], "we rotate whole heads")


def _rope_from_json(given: Mapping[str, Any], file: Path) -> tuple[float, dict[str, Any]]:
    """Base of the frequencies, and the fields of `RopeScaling`; from either version's keys."""
    section = "rope_scaling" if given.get("rope_scaling") else "rope_parameters"
    rope = {key: value for key, value in (given.get(section) or {}).items() if value is not None}
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    theta = rope.pop("rope_theta", given.get("rope_theta", 10_000.0))
    kind = "none" if kind == "default" else kind
    if kind not in ROPE_KEYS:
        _refuse(file, f"{section}.rope_type", kind, "known are default, linear, llama3, yarn")
    keys = ROPE_KEYS[kind]
    if "original_max_seq_len" in keys:
        original = given.get("original_max_position_embeddings", given["max_position_embeddings"])
        rope.setdefault("original_max_position_embeddings", original)
    scaling = {"kind": kind} | {ours: rope.pop(theirs) for ours, theirs in keys.items() if theirs in rope}
    if kind == "yarn":
        scaling.setdefault("factor", given["max_position_embeddings"] / scaling["original_max_seq_len"])
    for ours in ("factor", "low_freq_factor", "high_freq_factor"):
        if ours in keys and ours not in scaling:
            raise UserError(f"{file}: {section}.{keys[ours]} is missing, and {kind} needs it. Add it.")
    _refuse_rope_leftovers(rope, scaling, f"{section}.", file)
    return theta, scaling


def _refuse_rope_leftovers(rope: Mapping[str, Any], scaling: Mapping[str, Any], section: str, file: Path) -> None:
    """What no field of ours holds is only let through if it says what we do anyway."""
    ours = {"partial_rotary_factor": 1.0}
    if scaling["kind"] == "yarn":
        ours |= {"truncate": True, "attention_factor": attention_scale(RopeScaling.model_validate(scaling))}
    for key, value in rope.items():
        if key not in ours or not math.isclose(value, ours[key], rel_tol=1e-6):
            _refuse(file, section + key, value, f"only {ours[key]} is known" if key in ours else "not known")


def _weight_files(folder: Path) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        files = [folder / name for name in sorted(set(_read_json(index).get("weight_map", {}).values()))]
    else:
        files = [single]
    for file in files:
        if not file.is_file():
            bins = any(folder.glob("*.bin"))
            remedy = "Save the *.bin weights as safetensors first" if bins else "Get the whole folder"
            raise UserError(f"{file} is not there. {remedy}.")
    return files


def _stored_in(path: Path) -> list[StoredTensor]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
            return [StoredTensor(path, n, tuple(s.get_shape()), s.get_dtype()) for n, s in slices.items()]
    except SafetensorError as error:
        raise UserError(f"{path} is not safetensors: {error}. Download or export it again.") from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}. Download or export it again.") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} is not a JSON object. Download or export it again.")
    return value


# Both


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Our names -> shapes; nothing is allocated, for the decoder is built on the meta device."""
    return {name: tuple(parameter.shape) for name, parameter in Decoder(config).named_parameters()}


def _check_names(found: Collection[str], expected: Collection[str], where: str) -> None:
    """Refuse weights that are missing or too many."""
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


def _refuse(file: Path, key: str, value: object, why: str) -> NoReturn:
    raise UserError(f"{file}: {key} = {json.dumps(value)}: {why}. Choose another model.")
