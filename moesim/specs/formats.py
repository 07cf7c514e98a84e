"""How the weights of one routed expert are stored, and what a ``quantization_config`` claims about it.

What belongs here: bits, groups, scales, biases, and the byte count that follows. What does not: tensors on disk
(:mod:`moesim.specs.safetensors`), which win over every claim made here.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from moesim.errors import ConfigError


class ExpertFormat(BaseModel):
    """Storage of one expert's matrices.

    Parameters
    ----------
    bits : int
        Bits per weight.
    group_size : int or None
        Weights along the input dimension that share a scale; None with ``scale_bits`` set is one scale per output row.
    group_rows : int
        Output rows that share a scale (128 for 128 x 128 block scales).
    scale_bits, zero_point_bits : int
        Bits per group; 0 when there are none.
    has_bias : bool
        Whether every matrix has a bias vector of ``bias_bits`` per output.
    has_gate : bool
        Three matrices (gate, up, down) when true, two (up, down) otherwise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bits: int = Field(ge=1, le=32)
    group_size: int | None = Field(default=None, ge=1)
    group_rows: int = Field(default=1, ge=1)
    scale_bits: int = Field(default=0, ge=0, le=32)
    zero_point_bits: int = Field(default=0, ge=0, le=32)
    has_bias: bool = False
    bias_bits: int = Field(default=16, ge=1, le=32)
    has_gate: bool = True

    def _matrix_bytes(self, n_outputs: int, n_inputs: int) -> int:
        """Bytes of one matrix with its scales, zero points and bias; each tensor ends at a whole byte."""
        group_size = self.group_size or n_inputs
        n_groups = _ceil_div(n_outputs, self.group_rows) * _ceil_div(n_inputs, group_size)
        n_bytes = _ceil_div(n_outputs * n_inputs * self.bits, 8)
        n_bytes += _ceil_div(n_groups * self.scale_bits, 8) + _ceil_div(n_groups * self.zero_point_bits, 8)
        return n_bytes + (_ceil_div(n_outputs * self.bias_bits, 8) if self.has_bias else 0)

    def expert_bytes(self, hidden_size: int, expert_width: int) -> int:
        """Bytes of one routed expert: up (and gate) of width x hidden, down of hidden x width.

        Parameters
        ----------
        hidden_size, expert_width : int
            H and I.

        Returns
        -------
        int
            Weights, scales, zero points and biases of all matrices.

        Examples
        --------
        >>> ExpertFormat(bits=4, group_size=32, scale_bits=8).expert_bytes(4096, 2048)
        13369344
        """
        n_inward = 2 if self.has_gate else 1
        inward = self._matrix_bytes(expert_width, hidden_size)
        return n_inward * inward + self._matrix_bytes(hidden_size, expert_width)

    def expert_parameters(self, hidden_size: int, expert_width: int) -> int:
        """Weights and biases of one routed expert: 3 H I (2 H I without a gate) + 2 I + H biases."""
        n_matrices = 3 if self.has_gate else 2
        n_biases = (n_matrices - 1) * expert_width + hidden_size if self.has_bias else 0
        return n_matrices * hidden_size * expert_width + n_biases


class Precision(BaseModel):
    """What a config claims: the experts' own format and the bits of the other projections."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    experts: ExpertFormat
    weight_bits: int
    unquantized_bits: int


_DTYPE_BITS = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
}

Claim = Callable[[Mapping[str, Any]], dict[str, int | None]]


def _mxfp4(_: Mapping[str, Any]) -> dict[str, int | None]:
    """OCP microscaling: one 8-bit exponent per 32 four-bit values."""
    return {"bits": 4, "group_size": 32, "scale_bits": 8}


def _fp8(keys: Mapping[str, Any]) -> dict[str, int | None]:
    """Block scales when ``weight_block_size`` is given (32-bit, 8-bit with ``scale_fmt`` ue8m0), else one per row."""
    scale_bits = 8 if keys.get("scale_fmt") == "ue8m0" else 32
    block = keys.get("weight_block_size")
    if block is None:
        return {"bits": 8, "scale_bits": scale_bits}
    return {"bits": 8, "group_rows": int(block[0]), "group_size": int(block[1]), "scale_bits": scale_bits}


def _gptq(keys: Mapping[str, Any]) -> dict[str, int | None]:
    """One 16-bit scale and one packed zero point per group; ``group_size`` -1 is one group per row."""
    bits = int(keys["bits"])
    return {"bits": bits, "group_size": _group(keys["group_size"]), "scale_bits": 16, "zero_point_bits": bits}


def _awq(keys: Mapping[str, Any]) -> dict[str, int | None]:
    """As GPTQ, with the bits also spelled ``w_bit`` and the group ``q_group_size``."""
    bits = int(keys.get("bits", keys.get("w_bit", 4)))
    group = keys.get("group_size", keys.get("q_group_size", 128))
    zero_point_bits = bits if keys.get("zero_point", True) else 0
    return {"bits": bits, "group_size": _group(group), "scale_bits": 16, "zero_point_bits": zero_point_bits}


def _bitsandbytes(keys: Mapping[str, Any]) -> dict[str, int | None]:
    """4-bit: blocks of 64 with a 32-bit (8-bit when double-quantised) absmax; 8-bit: one 32-bit scale per row."""
    if keys.get("load_in_4bit"):
        return {"bits": 4, "group_size": 64, "scale_bits": 8 if keys.get("bnb_4bit_use_double_quant") else 32}
    return {"bits": 8, "scale_bits": 32}


def _mlx(keys: Mapping[str, Any]) -> dict[str, int | None]:
    """Affine groups: a 16-bit scale and a 16-bit bias each; mxfp4 mode has the 8-bit exponent only."""
    if keys.get("mode") == "mxfp4":
        return _mxfp4(keys)
    bits, group = int(keys["bits"]), int(keys["group_size"])
    return {"bits": bits, "group_size": group, "scale_bits": 16, "zero_point_bits": 16}


def _compressed_tensors(keys: Mapping[str, Any]) -> dict[str, int | None]:
    """Read the ``weights`` entry of the one config group; asymmetric schemes add a zero point per group."""
    groups = list(keys["config_groups"].values())
    if len(groups) != 1:
        raise KeyError("config_groups")
    weights = groups[0]["weights"]
    bits, group = int(weights["num_bits"]), weights.get("group_size")
    zero_point_bits = 0 if weights.get("symmetric", True) else bits
    scale_bits = 8 if weights.get("type") == "float" and bits == 4 else 16
    return {"bits": bits, "group_size": _group(group), "scale_bits": scale_bits, "zero_point_bits": zero_point_bits}


_CLAIMS: dict[str, Claim] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "mlx": _mlx,
    "mxfp4": _mxfp4,
}

# What these methods leave in the model's own type: attention stays wide, only the experts shrink.
_EXPERTS_ONLY = frozenset({"mxfp4"})


def read_precision(config: Mapping[str, Any], file: str, *, has_bias: bool, has_gate: bool) -> Precision:
    """Turn the dtype and quantisation keys of a config into the formats they claim.

    Experts follow their own setting where the config has one (``expert_dtype``, a per-module entry whose path names
    the experts, an exclusion list that names them), the global one otherwise.

    Parameters
    ----------
    config : mapping
        The config, with ``quantization_config`` or ``quantization`` when quantised.
    file : str
        Where it is from, for messages.
    has_bias, has_gate : bool
        What the family's experts look like.

    Raises
    ------
    ConfigError
        If the method or dtype is unknown, or a key that the method needs is missing.
    """
    unquantized_bits = _dtype_bits(config, file)
    shape = {"has_bias": has_bias, "has_gate": has_gate, "bias_bits": unquantized_bits}
    plain = ExpertFormat(bits=unquantized_bits, **shape)
    claim = config.get("quantization_config") or config.get("quantization")
    if not claim:
        return Precision(experts=plain, weight_bits=unquantized_bits, unquantized_bits=unquantized_bits)
    method = str(claim.get("quant_method", "mlx" if "bits" in claim else "")).lower()
    own = _experts_own_claim(claim)
    everything = _read_claim(method, claim, file)
    experts = everything if own is None else _read_claim(method, {**claim, **own}, file)
    if config.get("expert_dtype") == "fp4":
        experts = _mxfp4(claim)
    weight_bits = unquantized_bits if method in _EXPERTS_ONLY else everything["bits"] or unquantized_bits
    expert_format = plain if _experts_excluded(claim) else ExpertFormat.model_validate({**experts, **shape})
    return Precision(experts=expert_format, weight_bits=weight_bits, unquantized_bits=unquantized_bits)


def _read_claim(method: str, claim: Mapping[str, Any], file: str) -> dict[str, int | None]:
    """Apply the method's row and name the file when it cannot be."""
    if method not in _CLAIMS:
        raise ConfigError(
            f"{file}: quantization_config.quant_method is {method!r}, known: {', '.join(sorted(_CLAIMS))}; "
            "write a TOML spec with an [experts] table (bits, group_size, scale_bits) instead"
        )
    try:
        return _CLAIMS[method](claim)
    except KeyError as missing:
        raise ConfigError(
            f"{file}: quantization_config of method {method!r} lacks a usable {missing}; "
            "write a TOML spec with an [experts] table (bits, group_size, scale_bits) instead"
        ) from None


def _experts_own_claim(claim: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Find a per-module entry for the routed experts; the first by name stands for all of them."""
    own = [value for path, value in sorted(claim.items()) if _names_experts(path) and isinstance(value, Mapping)]
    return own[0] if own else None


def _experts_excluded(claim: Mapping[str, Any]) -> bool:
    """Whether a list of modules that the quantiser skips names the routed experts."""
    lists = [claim.get(key) or [] for key in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")]
    return any(_names_experts(str(pattern)) for patterns in lists for pattern in patterns)


def _names_experts(path: str) -> bool:
    """Whether a module path names routed, not shared, experts."""
    return ("experts" in path and "shared_expert" not in path) or "switch_mlp" in path or "switch_glu" in path


def _dtype_bits(config: Mapping[str, Any], file: str) -> int:
    """Bits of the config's own dtype; absent means 16, what every published MoE checkpoint uses."""
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype not in _DTYPE_BITS:
        raise ConfigError(f"{file}: dtype is {dtype!r}, known: {', '.join(_DTYPE_BITS)}")
    return _DTYPE_BITS[str(dtype)]


def _group(size: Any) -> int | None:
    """Read a group size; None and -1 both mean one group per row."""
    return None if size is None or int(size) < 1 else int(size)


def _ceil_div(amount: int, unit: int) -> int:
    """Divide, rounding up."""
    return -(-amount // unit)
