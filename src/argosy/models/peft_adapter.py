"""Adapters in the format of PEFT, as transformers and vLLM load them: adapter_config.json, adapter_model.safetensors.

Modules have the names of the family's class in transformers; experts that it keeps in a list, or kept in one before
transformers 5, have a matrix each. What that class fuses (queries, keys and values, say) gets one adapter whose outer
matrix is block-diagonal: its rank is the sum of ours, and `rank_pattern` says so.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save
from torch import Tensor
from torch.nn import functional as F

from argosy.config.model import ModelConfig
from argosy.config.train import ALL_LINEAR, LoraConfig
from argosy.data.stores.model_folder import ADAPTER_CONFIG, model_folder, new_folder
from argosy.data.stores.store import is_url
from argosy.errors import ArgosyWarning, UserError, some_of
from argosy.models.hf import table_of
from argosy.models.hf_names import Conversion, conversions_of
from argosy.plan.mup import folded_factor
from argosy.plan.parameters import adapter_of, linear_name, parameter_table

ADAPTER_TENSORS = "adapter_model.safetensors"
MOST_ADAPTER_CONFIG_BYTES, MOST_ADAPTER_BYTES = 2**24, 2**36
PEFT_PREFIX = "base_model.model."
INNER_SUFFIX, OUTER_SUFFIX, MAGNITUDE_SUFFIX = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
UNKNOWN_IF_SET = (
    "modules_to_save", "fan_in_fan_out", "lora_bias", "target_parameters", "use_qalora", "trainable_token_indices",
    "megatron_config", "layer_replication", "alora_invocation_tokens", "kasa_config",
)  # fmt: skip
"""Settings of PEFT with which an adapter is something else than ours."""
INITS_OF_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of PEFT's init_lora_weights with which the weights beside the adapter begin as others too."""

MOST_PATTERN_REPEATS = 3
"""Repeats in a pattern of a module's name: with n of them, matching takes up to the name's length to the power n."""
_REPEAT, _REPEATED_GROUP = re.compile(r"[*+{]"), re.compile(r"\)[*+{]")

# r rank, M inputs, N outputs


@dataclass(frozen=True)
class PeftModule:
    """One module of theirs that can have an adapter, and the weights of ours that it is made of."""

    name: str
    """Without a prefix: model.layers.0.self_attn.q_proj."""
    ours: tuple[str, ...]
    """The names of our weights: several if theirs is fused."""
    expert: int | None
    """Index in our stack of experts."""
    conversion: Conversion
    factors: tuple[float, ...]
    """Factors of muP that theirs has in it, one for each of ours (`plan.mup.folded_factor`)."""


def peft_modules(config: ModelConfig) -> Iterator[PeftModule]:
    """Yield the modules of the family's class that have adapters where all our linear layers have.

    Raises: UserError if the class has a matrix of several layers that no adapter of its can stand for.
    """
    table = parameter_table(config)
    for conversion in conversions_of(config):
        if not any(name in table and table[name].is_linear for name in conversion.ours):
            continue
        is_stack = table[conversion.ours[0]].is_expert
        if is_stack and len(conversion.theirs) == 1:
            raise UserError(
                f"{linear_name(conversion.ours[0])}: {config.family} models of transformers keep all experts in one "
                "tensor, and PEFT has no names for adapters of single ones. Merge the adapter: argosy checkpoint merge."
            )
        factors = tuple(folded_factor(name, config) for name in conversion.ours)
        for number, theirs in enumerate(conversion.theirs):
            yield PeftModule(linear_name(theirs), conversion.ours, number if is_stack else None, conversion, factors)


# Out


def export_adapter(
    config: ModelConfig,
    lora: LoraConfig,
    adapter: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    out: str | Path,
    base: tuple[str, str] = ("", ""),
    others: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write the adapter as PEFT's folder `out`, here or at a URL; whole or not at all.

    `adapter`: its tensors by our names. `weights`: those beside it, which only DoRA reads, one at a time. `base`:
    where others find these, and the revision. `others`: further files, by name.

    Raises: UserError if `out` exists, or PEFT cannot express the adapter; StorageError if it cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    left_out, last_of_experts = [], set[str]()
    for module in peft_modules(config):
        parts = _parts_of(module, lora, adapter, weights)
        if not parts:
            left_out.append(module.name)
            continue
        tensors |= {f"{PEFT_PREFIX}{module.name}.{part}": t.detach().float().contiguous() for part, t in parts.items()}
        ranks[module.name] = len(parts[INNER_SUFFIX])
        if module.expert is not None:
            last_of_experts.add(module.name.rpartition(".")[2])
    unread = [name for name in ranks if ".experts." not in name and name.rpartition(".")[2] in last_of_experts]
    if unread:  # 0.21 takes all modules with such a name for experts, which transformers 5 keeps in one tensor
        warnings.warn(
            f"{out}: beside transformers 5, PEFT leaves out the adapters of {some_of(unread, 1)}, which are named as "
            "those of experts. Use merged weights there: export without --adapter.",
            ArgosyWarning,
            stacklevel=1,
        )
    factors = {name: rank // lora.rank for name, rank in ranks.items() if rank != lora.rank}
    is_rslora = lora.kind == "rslora" and not last_of_experts  # PEFT scales fused experts as if they were plain LoRA's
    alpha = lora.alpha if is_rslora or lora.kind != "rslora" else lora.scale * lora.rank
    root = 0.5 if is_rslora else 1.0
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base[0],
        "revision": base[1] or None,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(_short(list(ranks), left_out)),
        "rank_pattern": {name: factor * lora.rank for name, factor in factors.items()},
        "alpha_pattern": {name: factor**root * alpha for name, factor in factors.items()},
        "use_rslora": is_rslora,
        "use_dora": lora.kind == "dora",
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    files = {ADAPTER_CONFIG: f"{json.dumps(described, indent=2)}\n".encode()}
    files[ADAPTER_TENSORS] = save(tensors, metadata={"format": "pt"})
    with new_folder(out) as folder:
        for name, data in {**others, **files}.items():
            with folder.file(name) as sink:
                sink.write(data)


def _parts_of(
    module: PeftModule, lora: LoraConfig, adapter: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the adapter of one of their modules by PEFT's names of its parts; nothing if none of ours has one."""

    def of(name: str, part: str) -> Tensor:
        tensor = adapter[f"{adapter_of(name)}.{part}"]
        return tensor if module.expert is None else tensor[module.expert]

    given = [name for name in module.ours if f"{adapter_of(name)}.a" in adapter]
    if not given:
        return {}
    outers, first = [], 0
    for name, factor in zip(module.ours, module.factors, strict=True):
        rows = of(name, "b") if name in given else weights[name].new_zeros(len(weights[name]), lora.rank)
        outer = rows.new_zeros(len(rows), lora.rank * len(given))
        if name in given:
            outer[:, first : first + lora.rank] = rows * factor
            first += lora.rank
        outers.append(outer)
    parts = {INNER_SUFFIX: torch.cat([of(name, "a") for name in given]), OUTER_SUFFIX: _to_theirs(module, outers)}
    if lora.kind == "dora":
        parts[MAGNITUDE_SUFFIX] = _to_theirs(
            module,
            [
                (_length(weights[name], module.expert) + (of(name, "magnitude") if name in given else 0.0)) * factor
                for name, factor in zip(module.ours, module.factors, strict=True)
            ],
        )
    return parts


def _length(weight: Tensor, expert: int | None) -> Tensor:
    return (weight if expert is None else weight[expert]).float().norm(dim=-1)


def _added_lengths(module: PeftModule, lengths: Tensor, table: Sequence[Tensor], file: str) -> list[Tensor]:
    """Return by how much DoRA's lengths of their module are above those of our weights, which are in `table`."""
    outputs = sum(len(weight) for weight in table)
    if lengths.shape != (outputs,):
        raise UserError(
            f"{file}: {module.name}.{MAGNITUDE_SUFFIX} has shape {list(lengths.shape)}, and this model's weights ask "
            f"for {[outputs]}. Name the weights that the adapter was trained with."
        )
    ours = _to_ours(module, lengths.float())
    return [of_ours - _length(weight, None) for of_ours, weight in zip(ours, table, strict=True)]


def _to_theirs(module: PeftModule, rows: Sequence[Tensor]) -> Tensor:
    """Put what belongs to the outputs of our weights in the order of theirs."""
    if module.expert is not None:
        return rows[0]
    (theirs,) = module.conversion.to_theirs(rows)
    return theirs


def _short(names: Sequence[str], others: Sequence[str]) -> set[str]:
    """Return the last parts of the names, where they mean no other module; else the whole names."""
    taken = {name.rpartition(".")[2] for name in others}
    return {name if (last := name.rpartition(".")[2]) in taken else last for name in names}


# In


def import_adapter(
    folder: str | Path, config: ModelConfig, weights: Mapping[str, Tensor]
) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Read PEFT's folder, here or at a URL: its settings, and its tensors (fp32) by our names.

    `weights`: those of the model of `config`, which only DoRA reads, one at a time.

    Raises: UserError, naming file, key and value, for an adapter that ours could not be, or of another model.
    """
    place = model_folder(folder)
    config_file, tensor_file = place.where(ADAPTER_CONFIG), place.where(ADAPTER_TENSORS)
    if any(place.size(name) is None for name in (ADAPTER_CONFIG, ADAPTER_TENSORS)):
        raise UserError(
            f"{place.name}: no adapter in PEFT's format there. Give a folder with {ADAPTER_CONFIG} and "
            f"{ADAPTER_TENSORS}."
        )
    said = table_of(place.content(ADAPTER_CONFIG, MOST_ADAPTER_CONFIG_BYTES), config_file)
    lora = _settings(said, config_file)
    try:
        stored = load(place.content(ADAPTER_TENSORS, MOST_ADAPTER_BYTES)) if is_url(folder) else load_file(tensor_file)
    except SafetensorError as error:
        raise UserError(f"{tensor_file} is not safetensors: {error}. Download or export it again.") from None
    stored = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in stored.items()}
    adapter: dict[str, list[Tensor]] = {}
    scale = 0.0
    for module in peft_modules(config):
        names = {part: f"{module.name}.{part}" for part in (INNER_SUFFIX, OUTER_SUFFIX, MAGNITUDE_SUFFIX)}
        parts = {part: stored.pop(name) for part, name in names.items() if name in stored}
        if parts:
            own = lora.model_copy(update=_of_module(module.name, said))
            scale = scale or (lora.scale if math.isclose(own.scale, lora.scale, rel_tol=1e-6) else own.scale)
            _take(adapter, module, parts, lora.rank, own, scale, weights, tensor_file)
    if stored or not adapter:
        what = f"{min(stored)} has" if stored else "the tensors have"
        raise UserError(
            f"{tensor_file}: {what} no place in this model ({config.family}). Name its own weights, "
            "or merge it with PEFT if that saved embedding or head too."
        )
    rank = max(len(inner) for name, some in adapter.items() if name.endswith(".a") for inner in some)
    whole = {name: [_of_rank(rank, name, tensor) for tensor in some] for name, some in adapter.items()}
    tensors = {name: torch.stack(some) if "_lora." in name else some[0] for name, some in whole.items()}
    alpha = lora.alpha * (scale / lora.scale) * (rank / lora.rank) ** (0.5 if lora.kind == "rslora" else 1.0)
    return lora.model_copy(update={"rank": rank, "alpha": alpha, "targets": _targets(config, tensors)}), tensors


def _of_rank(rank: int, name: str, tensor: Tensor) -> Tensor:
    """Return a part of an adapter at such a rank; more of it is zeros, which changes nothing."""
    if name.endswith(".a"):
        return F.pad(tensor, (0, 0, 0, rank - len(tensor)))
    return F.pad(tensor, (0, rank - tensor.shape[1])) if name.endswith(".b") else tensor


def _of_module(name: str, said: Mapping[str, Any]) -> dict[str, float]:
    """Return rank and alpha of one module; PEFT takes the first pattern that matches its name."""
    given = {"rank": said["r"], "alpha": said["lora_alpha"]}
    patterns = {key: (said.get(f"{key}_pattern") or {}).items() for key in given}
    return {
        key: next((own for end, own in patterns[key] if re.match(rf"(.*\.)?({end})$", name)), usual)
        for key, usual in given.items()
    }


def _settings(said: Mapping[str, Any], file: str) -> LoraConfig:
    for key in UNKNOWN_IF_SET:
        if said.get(key):
            raise UserError(
                f"{file}: {key} = {said[key]!r}: adapters here have no such part. Merge it with PEFT first."
            )
    if said.get("peft_type") != "LORA" or said.get("bias", "none") != "none":
        raise UserError(
            f"{file}: peft_type = {said.get('peft_type')!r}, bias = {said.get('bias')!r}: only LORA without "
            "biases is known. Merge it with PEFT first."
        )
    init: Any = said.get("init_lora_weights")
    if str(init).lower().startswith(INITS_OF_WEIGHTS):
        raise UserError(
            f"{file}: init_lora_weights = {init!r}: the adapter belongs to weights that this has changed. Merge it "
            "with PEFT first."
        )
    for key, kinds in (("rank_pattern", int), ("alpha_pattern", int | float)):
        pattern: Any = said.get(key) or {}
        if not isinstance(pattern, dict) or not all(
            _is_pattern(end) and isinstance(value, kinds) and 0 < value < math.inf for end, value in pattern.items()
        ):
            raise UserError(
                f"{file}: {key} = {repr(pattern)[:100]}: it must give positive numbers to names or regular "
                f"expressions, without repeated groups and with at most {MOST_PATTERN_REPEATS} repeats. Restore "
                "the file."
            )
    rank: Any = said.get("r")
    alpha: Any = said.get("lora_alpha")
    are_numbers = isinstance(rank, int) and isinstance(alpha, int | float) and not isinstance(rank, bool)
    if not are_numbers or not rank > 0 or not 0 < alpha < math.inf:
        raise UserError(f"{file}: r = {rank!r}, lora_alpha = {alpha!r}: both must be positive numbers.")
    if said.get("use_dora") and said.get("use_rslora"):
        raise UserError(f"{file}: use_dora and use_rslora go one at a time. Merge it with PEFT first.")
    dropout: Any = said.get("lora_dropout") or 0.0
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise UserError(f"{file}: lora_dropout = {dropout!r}: it must be a number from 0 to below 1.")
    kind = "dora" if said.get("use_dora") else "rslora" if said.get("use_rslora") else "lora"
    return LoraConfig(rank=rank, alpha=float(alpha), kind=kind, dropout=float(dropout))


def _is_pattern(text: str) -> bool:
    """Return True for a regular expression that takes little time on a module's name, whatever it is."""
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return False
    return not _REPEATED_GROUP.search(text) and len(_REPEAT.findall(text)) <= MOST_PATTERN_REPEATS


def _take(
    adapter: dict[str, list[Tensor]],
    module: PeftModule,
    parts: Mapping[str, Tensor],
    unit: int,
    lora: LoraConfig,
    scale: float,
    weights: Mapping[str, Tensor],
    file: str,
) -> None:
    """Add one of their modules to `adapter`, by our names; of a stack of experts, each adds a tensor.

    unit: the rank of each of ours, if theirs is fused of several. lora: the module's rank and alpha. scale: the factor
    on the adapter's part here, which the outer matrix makes up for.
    """
    table = [weights[name] if module.expert is None else weights[name][module.expert] for name in module.ours]
    inputs, outputs = table[0].shape[-1], sum(len(weight) for weight in table)
    wanted = {INNER_SUFFIX, OUTER_SUFFIX, *((MAGNITUDE_SUFFIX,) if lora.kind == "dora" else ())}
    inner, outer = parts.get(INNER_SUFFIX), parts.get(OUTER_SUFFIX)
    if set(parts) != wanted or inner is None or outer is None:
        raise UserError(f"{file}: {module.name} has {', '.join(sorted(parts))}, and needs {', '.join(sorted(wanted))}.")
    rank = lora.rank
    if inner.shape != (rank, inputs) or outer.shape != (outputs, rank):
        raise UserError(
            f"{file}: {module.name} has matrices of shape {list(inner.shape)} and {list(outer.shape)}, and rank "
            f"{rank} beside this model's weights asks for {[rank, inputs]} and {[outputs, rank]}. Name "
            "the weights that the adapter was trained with."
        )
    if not math.isclose(lora.scale, scale, rel_tol=1e-6):
        outer = outer.float() * (lora.scale / scale)
    blocks = _to_ours(module, outer)
    added = _added_lengths(module, parts[MAGNITUDE_SUFFIX], table, file) if MAGNITUDE_SUFFIX in parts else []
    for place, here in _blocks(blocks, added, rank, unit):
        prefix = adapter_of(module.ours[place])
        adapter.setdefault(f"{prefix}.a", []).append(inner[here].float())
        adapter.setdefault(f"{prefix}.b", []).append(blocks[place][:, here].float().contiguous())
        if added:
            adapter.setdefault(f"{prefix}.magnitude", []).append(added[place])


def _blocks(blocks: Sequence[Tensor], added: Sequence[Tensor], rank: int, unit: int) -> list[tuple[int, slice]]:
    """Return which of our weights in one of theirs have an adapter, and which part of its rank: a block each if the
    outer matrix is block-diagonal, else all of it."""
    count = rank // unit
    having = list(range(len(blocks)))
    if 1 < count < len(blocks):  # the others have no adapter
        having = [p for p in having if blocks[p].any() or (added and bool((added[p].abs() > 1e-5).any()))]
    own = [slice(n * unit, (n + 1) * unit) for n in range(len(having))]
    if count > 1 and rank == len(having) * unit:
        others = [blocks[p].clone() for p in having]
        for block, here in zip(others, own, strict=True):
            block[:, here] = 0
        if not any(block.any() for block in others):
            return list(zip(having, own, strict=True))
    return [(place, slice(0, rank)) for place in range(len(blocks))]


def _to_ours(module: PeftModule, rows: Tensor) -> list[Tensor]:
    ours = [rows] if module.expert is not None else module.conversion.to_ours([rows])
    return [some / factor for some, factor in zip(ours, module.factors, strict=True)]


def _targets(config: ModelConfig, adapter: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the shortest names of the layers that have an adapter."""
    linear = [name for name, parameter in parameter_table(config).items() if parameter.is_linear]
    having = [linear_name(name) for name in linear if f"{adapter_of(name)}.a" in adapter]
    others = [linear_name(name) for name in linear if f"{adapter_of(name)}.a" not in adapter]
    return tuple(sorted(_short(having, others))) if others else (ALL_LINEAR,)
