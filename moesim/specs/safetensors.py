"""How many bytes one routed expert really has, from the headers of ``*.safetensors`` files.

Only headers are read: eight bytes of length, then JSON. Weights stay on disk. Two layouts are known: tensors of one
expert each (``...layers.3.mlp.experts.17.up_proj.weight``) and fused ones with all experts of a layer
(``...layers.3.mlp.experts.gate_up_proj``), whose bytes are divided by the number of experts.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moesim.errors import ConfigError

# The format's own limit; a longer "length" is not a safetensors file.
_MAX_HEADER_BYTES = 100_000_000
_INDEX_NAME = "model.safetensors.index.json"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
_ONE_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.(.+)$")
# Path segments under which families keep all experts of a layer in one tensor.
_FUSED_SEGMENTS = frozenset({"experts", "switch_mlp", "switch_glu", "input_linear", "output_linear"})
# Parts of a tensor's last name that mark what quantisers put beside the weights.
_BESIDE_WEIGHTS = ("absmax", "bias", "g_idx", "scale", "scb", "zero")
_FLOAT_BITS = {"F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of a header: its element type, shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    n_bytes: int


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """What the tensors say about routed experts.

    Parameters
    ----------
    expert_bytes : tuple of int
        Bytes of one expert, per MoE layer.
    weight_bits : int or None
        Bits per weight where the element type shows it (floats); None for packed integers.
    """

    expert_bytes: tuple[int, ...]
    weight_bits: int | None


@dataclass(slots=True)
class _Layer:
    """Tally of one layer while the headers are read."""

    per_expert: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    fused_bytes: int = 0
    weight_dtypes: set[str] = field(default_factory=set)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read the header of one safetensors file.

    Parameters
    ----------
    path : Path
        The file; nothing behind its header is touched.

    Returns
    -------
    dict of str to TensorInfo

    Raises
    ------
    ConfigError
        If the file is missing, short, or not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > _MAX_HEADER_BYTES:
                raise ConfigError(f"{path}: is not a safetensors file: no header length in the first 8 bytes")
            text = file.read(length)
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be read: {problem.strerror}") from problem
    if len(text) < length:
        raise ConfigError(f"{path}: the header is cut: {len(text)} of {length} bytes; copy the file again")
    try:
        entries = json.loads(text)
        return {
            name: TensorInfo(entry["dtype"], tuple(entry["shape"]), entry["data_offsets"][1] - entry["data_offsets"][0])
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as problem:
        raise ConfigError(f"{path}: the header is not a list of tensors; copy the file again") from problem


def checkpoint_files(folder: Path) -> list[Path]:
    """Name the files of a checkpoint: those of its index where there is one, else every ``*.safetensors``.

    Raises
    ------
    ConfigError
        If the index is damaged or names a file that is not there.
    """
    index = folder / _INDEX_NAME
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ConfigError(f"{index}: has no weight_map of tensor names to files") from problem
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{index}: names {len(names)} files, {len(missing)} are missing, first {missing[0]}; "
            "complete the checkpoint, or load the config alone to take expert bytes from the formula"
        )
    return [folder / name for name in names]


def measure_experts(files: Iterable[Path], moe_layers: Sequence[int], n_experts: Sequence[int]) -> ExpertTensors:
    """Sum the tensors of one routed expert in every MoE layer.

    Parameters
    ----------
    files : iterable of Path
        The checkpoint's files.
    moe_layers, n_experts : sequence of int, length L
        Model index and expert count of each MoE layer.

    Raises
    ------
    ConfigError
        If a layer has no expert tensors, lacks an expert, or its experts differ in size.
    """
    layers: dict[int, _Layer] = defaultdict(_Layer)
    seen: dict[str, Path] = {}
    where = ""
    for path in files:
        where = where or str(path.parent)
        for name, tensor in read_header(path).items():
            if name in seen:
                raise ConfigError(f"{path}: tensor {name} is also in {seen[name]}; keep one copy of the checkpoint")
            seen[name] = path
            _tally(layers, name, tensor)
    sizes = tuple(
        _one_expert(layers.get(layer, _Layer()), layer, count, where)
        for layer, count in zip(moe_layers, n_experts, strict=True)
    )
    dtypes = {dtype for layer in moe_layers for dtype in layers[layer].weight_dtypes}
    bits = {_FLOAT_BITS.get(dtype) for dtype in dtypes}
    return ExpertTensors(sizes, bits.pop() if len(bits) == 1 else None)


def _tally(layers: Mapping[int, _Layer], name: str, tensor: TensorInfo) -> None:
    """Add a tensor to its layer if it belongs to routed experts; extra prediction modules number layers anew."""
    match = _LAYER.search(name)
    if match is None or "mtp" in name.split("."):
        return
    rest = match[2]
    layer = layers[int(match[1])]
    one = _ONE_EXPERT.search(rest)
    if one is not None:
        layer.per_expert[int(one[1])] += tensor.n_bytes
    elif _FUSED_SEGMENTS.intersection(rest.split(".")):
        layer.fused_bytes += tensor.n_bytes
    else:
        return
    last_name = rest.rpartition(".")[2].lower()
    if not any(word in last_name for word in _BESIDE_WEIGHTS):
        layer.weight_dtypes.add(tensor.dtype)


def _one_expert(layer: _Layer, index: int, count: int, where: str) -> int:
    """Bytes of one expert of a layer, after checking that all have them."""
    if not layer.per_expert and not layer.fused_bytes:
        raise ConfigError(
            f"{where}: model layer {index} has no expert tensors; complete the checkpoint, "
            "or load the config alone to take expert bytes from the formula"
        )
    missing = sorted(set(range(count)) - set(layer.per_expert)) if layer.per_expert else []
    if missing:
        raise ConfigError(f"{where}: model layer {index} lacks experts {missing[:5]} of {count}")
    sizes = set(layer.per_expert.values())
    if len(sizes) > 1:
        raise ConfigError(
            f"{where}: experts of model layer {index} have {min(sizes)} to {max(sizes)} bytes, "
            "allowed: one size per layer"
        )
    return (sizes.pop() if sizes else 0) + -(-layer.fused_bytes // count)
