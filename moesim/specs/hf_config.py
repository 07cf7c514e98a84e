"""From a ``config.json`` on disk to a :class:`ModelSpec`; nothing is fetched."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesim.errors import ConfigError, UnknownNameError
from moesim.specs.config_reader import ConfigReader
from moesim.specs.families import DENSE_FAMILIES, FAMILIES
from moesim.specs.formats import ExpertFormat, read_precision
from moesim.specs.model import ModelSpec
from moesim.specs.safetensors import ExpertTensors, checkpoint_files, measure_experts
from moesim.specs.validation import validated

# Where multimodal configs keep the language model, and the ending its model_type then has.
_TEXT_PARTS = ("text_config", "language_config", "llm_config")
_TEXT_SUFFIX = "_text"
_EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Keys that a multimodal config states once, outside its text part.
_SHARED_KEYS = ("quantization_config", "quantization", "dtype", "torch_dtype", "tie_word_embeddings", "expert_dtype")


def spec_from_config(
    config: Mapping[str, Any],
    *,
    file: str,
    name: str,
    source: str,
    notes: tuple[str, ...] = (),
    experts: ExpertFormat | None = None,
    overrides: Mapping[str, Any] | None = None,
    folder: Path | None = None,
) -> ModelSpec:
    """Build a spec from the keys of a ``config.json``.

    Parameters
    ----------
    config : mapping
        The config.
    file, name, source : str
        For messages, and the fields of the spec.
    notes : tuple of str
        Passed on.
    experts : ExpertFormat, optional
        Storage of routed experts; wins over the config's quantisation keys.
    overrides : mapping, optional
        Further fields of :class:`ModelSpec` that win over the config, such as ``kv_bits``.
    folder : Path, optional
        Where ``*.safetensors`` may lie; their headers win over every claim.

    Returns
    -------
    ModelSpec

    Raises
    ------
    ConfigError
        If the model is dense, a key is missing or wrong, or the tensors contradict each other.
    UnknownNameError
        If no reader knows the family.
    """
    text = _text_part(config)
    family = _family(text, config, file)
    reader = ConfigReader(text, family, file)
    counts = [text[key] for key in _EXPERT_COUNT_KEYS if key in text]
    if counts and all(count is None or count in (0, 1) for count in counts):
        raise reader.dense(f"the expert count is {counts[0]}")
    shape = FAMILIES[family](reader)
    if not shape.moe_layers:
        raise reader.dense("none of its layers has routed experts")
    fields: dict[str, Any] = {
        **shape.model_dump(exclude={"attention", "routing", "has_bias", "has_gate", "ties_embeddings"}),
        "attention": shape.attention,
        "routing": shape.routing or "topk",
        "name": name,
        "family": family,
        "source": source,
        "notes": notes,
        "hidden_size": reader.integer("hidden_size", least=1),
        "vocab_size": reader.integer("vocab_size", least=1),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", default=shape.ties_embeddings),
    }
    precision = read_precision(text, file, has_bias=shape.has_bias, has_gate=shape.has_gate)
    fields["expert_format"] = experts or precision.experts
    fields["weight_bits"] = precision.weight_bits
    fields["unquantized_bits"] = precision.unquantized_bits
    claimed = validated(ModelSpec, {**fields, **(overrides or {})}, file)
    files = checkpoint_files(folder) if folder is not None else []
    if not files:
        return claimed
    return _settled_by_tensors(claimed, measure_experts(files, claimed.moe_layers, claimed.n_experts), file)


def read_config(path: Path) -> dict[str, Any]:
    """Read a ``config.json``.

    Raises
    ------
    ConfigError
        If it cannot be read or is not a JSON object.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be read: {problem.strerror}") from problem
    except ValueError as problem:
        raise ConfigError(f"{path}: is not valid JSON: {problem}") from problem
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: is a {type(config).__name__}, allowed: a JSON object of config keys")
    return config


def _text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Find the language model's keys, with those that only the outer config states."""
    inner = next((config[part] for part in _TEXT_PARTS if isinstance(config.get(part), Mapping)), None)
    if inner is None:
        return dict(config)
    shared = {key: config[key] for key in _SHARED_KEYS if config.get(key) is not None}
    return {**shared, **{key: value for key, value in inner.items() if value is not None or key not in shared}}


def _family(text: Mapping[str, Any], config: Mapping[str, Any], file: str) -> str:
    """Name the row of ``FAMILIES`` that reads this config."""
    candidates = [str(keys["model_type"]) for keys in (text, config) if keys.get("model_type")]
    if not candidates:
        raise ConfigError(f"{file}: key model_type is missing; it names the model family")
    families = [candidate.removesuffix(_TEXT_SUFFIX) for candidate in candidates]
    known = next((family for family in families if family in FAMILIES), None)
    if known is not None:
        return known
    if families[0] in DENSE_FAMILIES:
        raise ConfigReader(text, families[0], file).dense(f"{families[0]} has no routed experts")
    error = UnknownNameError.nearest("model family", families[0], FAMILIES)
    hint = "" if any(key in text for key in _EXPERT_COUNT_KEYS) else "; it has no expert count, so it may be dense"
    raise UnknownNameError(f"{file}: {error}{hint}; write a TOML spec with a [spec] table instead")


def _settled_by_tensors(claimed: ModelSpec, tensors: ExpertTensors, file: str) -> ModelSpec:
    """Let the tensors decide the expert bytes, and say so where the config claimed something else."""
    fields = {field: getattr(claimed, field) for field in ModelSpec.model_fields}
    fields |= {"expert_bytes": tensors.expert_bytes, "expert_bytes_source": "safetensors"}
    if tensors.expert_bytes != claimed.expert_bytes:
        claim, actual = claimed.expert_bytes[0], tensors.expert_bytes[0]
        bits = claimed.expert_format.bits
        fields["notes"] = (
            *claimed.notes,
            f"the config claims {bits}-bit experts of {claim} bytes, the tensors hold {actual} bytes: tensors used",
        )
        if tensors.weight_bits is not None and tensors.weight_bits != bits:
            kept = claimed.expert_format.model_dump(include={"has_bias", "has_gate", "bias_bits"})
            fields["expert_format"] = ExpertFormat(bits=tensors.weight_bits, **kept)
    return validated(ModelSpec, fields, file)
