"""What a trace file is: columns, their Arrow types, and the JSON in its footer (schema version 1).

Nothing here opens a file; see `reader` and `writer`.
"""

import hashlib
import json
from collections.abc import Collection
from typing import Any, Literal, Self

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA_VERSION = 1
METADATA_KEY = b"moesim"
KIND = "trace"

KEY_COLUMNS = ("request", "position", "phase", "step", "layer", "topk_ids")
"""Columns of every trace; never null."""

OPTIONAL_COLUMNS = ("topk_weights", "scores", "lookahead", "hidden", "token_id")
"""Columns that a file holds only if its source had them."""

PHASES = ("prefill", "decode")
MAX_EXPERT_ID = 2**15 - 1

ScoreKind = Literal["softmax", "sigmoid", "sqrtsoftplus", "logit"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelShape(_Frozen):
    """The numbers of a model that give a trace's rows their meaning; L = MoE layers.

    Attributes
    ----------
    name : str
        Name of the model, as the catalog of models spells it.
    n_layers : int
        L, counting MoE layers only.
    n_experts, top_k : tuple of int, length L
        Routed experts and selections per token, layer by layer.
    layer_index : tuple of int, length L
        The model's own index of each MoE layer.
    routing : tuple of {"topk", "hash"}, length L
        How the layer selects: on router scores, or by a table of token ids.
    hidden_size : int or None
        Width of the router's input; needed for the column ``hidden``.
    n_identity_experts : int
        Ids ``n_experts[layer]`` and up that are legal selections without weights.
    """

    name: str = Field(min_length=1)
    n_layers: int = Field(ge=1, le=MAX_EXPERT_ID)
    n_experts: tuple[int, ...]
    top_k: tuple[int, ...]
    layer_index: tuple[int, ...]
    routing: tuple[Literal["topk", "hash"], ...]
    hidden_size: int | None = Field(default=None, ge=1)
    n_identity_experts: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _check_lists(self) -> Self:
        for name in ("n_experts", "top_k", "layer_index", "routing"):
            length = len(getattr(self, name))
            if length != self.n_layers:
                raise ValueError(f"{name} has {length} entries for {self.n_layers} MoE layers; give one per layer")
        for layer, (n_experts, top_k) in enumerate(zip(self.n_experts, self.top_k, strict=True)):
            n_ids = n_experts + self.n_identity_experts
            if not n_experts >= 1 or n_ids > MAX_EXPERT_ID + 1:
                raise ValueError(f"n_experts[{layer}] = {n_experts}: allowed are 1..{MAX_EXPERT_ID + 1} ids")
            if not 1 <= top_k <= n_ids:
                raise ValueError(f"top_k[{layer}] = {top_k}: allowed are 1..{n_ids}")
        if any(index < 0 for index in self.layer_index) or list(self.layer_index) != sorted(set(self.layer_index)):
            raise ValueError(f"layer_index {self.layer_index} must rise strictly from 0 or more")
        return self

    @property
    def max_experts(self) -> int:
        """E: the width of the columns ``scores`` and ``lookahead``."""
        return max(self.n_experts)

    @property
    def max_top_k(self) -> int:
        """k: the width of the columns ``topk_ids`` and ``topk_weights``."""
        return max(self.top_k)

    @property
    def n_ids(self) -> tuple[int, ...]:
        """Legal ids of each layer, identity experts included."""
        return tuple(n_experts + self.n_identity_experts for n_experts in self.n_experts)

    @classmethod
    def uniform(
        cls, name: str, n_layers: int, n_experts: int, top_k: int, *, hidden_size: int | None = None
    ) -> "ModelShape":
        """Build the shape of a model whose layers are all MoE, all alike and all routed by score."""
        return cls(
            name=name,
            n_layers=n_layers,
            n_experts=(n_experts,) * n_layers,
            top_k=(top_k,) * n_layers,
            layer_index=tuple(range(n_layers)),
            routing=("topk",) * n_layers,
            hidden_size=hidden_size,
        )


class Provenance(_Frozen):
    """Where a trace comes from: recorded, imported from what, or synthetic with which seed."""

    kind: Literal["recorded", "imported", "synthetic"]
    source: str
    licence: str
    seed: int | None = None
    note: str = ""


class RequestMeta(_Frozen):
    """What is known of one request beside its rows; ``prompt_tokens`` counts the whole prompt, cached parts too."""

    request: int = Field(ge=0)
    domain: str | None = None
    prompt_tokens: int | None = Field(default=None, ge=0)


class TraceMeta(_Frozen):
    """The settings of a trace, stored as JSON in the footer of every file.

    Attributes
    ----------
    score_kind : {"softmax", "sigmoid", "sqrtsoftplus", "logit"} or None
        The function that made the column ``scores``: thresholds mean different things in each.
    score_coverage : {"all"} or None
        ``"all"`` when the file has the scores of all experts; None when it has none.
    weights_kind : str or None
        What ``topk_weights`` are, in words.
    lookahead_source : str or None
        Which hidden state the column ``lookahead`` read.
    expert_bytes : tuple of int or None
        Bytes of one expert in each layer, where the source states them.
    domain : str or None
        Domain of requests that name none of their own.
    requests : tuple of RequestMeta
        One entry for each request in the file.
    """

    schema_version: Literal[1] = 1
    model: ModelShape
    score_kind: ScoreKind | None = None
    score_coverage: Literal["all"] | None = None
    weights_kind: str | None = None
    lookahead_source: str | None = None
    expert_bytes: tuple[int, ...] | None = None
    provenance: Provenance
    recorder_version: str | None = None
    device: str | None = None
    domain: str | None = None
    requests: tuple[RequestMeta, ...] = ()

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.expert_bytes is not None and (
            len(self.expert_bytes) != self.model.n_layers or min(self.expert_bytes) < 1
        ):
            raise ValueError(f"expert_bytes needs {self.model.n_layers} positive sizes, one per MoE layer")
        numbers = [entry.request for entry in self.requests]
        if len(set(numbers)) != len(numbers):
            raise ValueError("requests: a request number is listed twice")
        return self

    def config_hash(self) -> str:
        """Hash everything but the list of requests: equal in all shards of one trace."""
        return _digest(self.model_dump(mode="json", exclude={"requests"}))


def canonical_json(value: object) -> str:
    """Write JSON with sorted keys and no spaces: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _digest(value: object) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def seal(content: dict[str, Any]) -> bytes:
    """Write a footer's JSON together with a digest of itself, since Parquet checks pages but not its footer."""
    return canonical_json(content | {"digest": _digest(content)}).encode()


def unseal(data: bytes) -> dict[str, Any]:
    """Read a footer's JSON back.

    Raises
    ------
    ValueError
        If it is no JSON object or differs from its own digest.
    """
    content = json.loads(data.decode())
    if not isinstance(content, dict):
        raise TypeError("the metadata is not a JSON object")
    digest = content.pop("digest", None)
    version = content.get("schema_version")
    # A newer schema may seal its files in another way; whoever reads the version refuses it by that name.
    is_newer = isinstance(version, int) and version > SCHEMA_VERSION
    if digest != _digest(content) and not is_newer:
        raise ValueError("the metadata differs from its own digest: the file was changed or damaged")
    return content


def arrow_schema(shape: ModelShape, columns: Collection[str]) -> pa.Schema:
    """Build the Arrow schema of a trace file.

    Parameters
    ----------
    shape : ModelShape
        Gives the widths E, k and H.
    columns : collection of str
        The optional columns that the file holds.

    Returns
    -------
    pyarrow.Schema
        `KEY_COLUMNS`, then the optional columns in the order of `OPTIONAL_COLUMNS`.
    """
    k = shape.max_top_k
    wide = pa.binary(2 * shape.max_experts)
    fields = [
        pa.field("request", pa.int32(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("phase", pa.dictionary(pa.int8(), pa.string()), nullable=False),
        pa.field("step", pa.int32(), nullable=False),
        pa.field("layer", pa.int16(), nullable=False),
        pa.field("topk_ids", pa.list_(pa.field("element", pa.int16(), nullable=False), k), nullable=False),
    ]
    optional = {
        "topk_weights": pa.list_(pa.field("element", pa.float32(), nullable=False), k),
        "scores": wide,
        "lookahead": wide,
        "hidden": pa.binary(2 * (shape.hidden_size or 1)),
        "token_id": pa.int32(),
    }
    fields += [pa.field(name, optional[name]) for name in OPTIONAL_COLUMNS if name in columns]
    return pa.schema(fields)


def row_bytes(shape: ModelShape, columns: Collection[str]) -> int:
    """Bytes of one uncompressed row, to size row groups."""
    sizes = {
        "topk_weights": 4 * shape.max_top_k,
        "scores": 2 * shape.max_experts,
        "lookahead": 2 * shape.max_experts,
        "hidden": 2 * (shape.hidden_size or 0),
        "token_id": 4,
    }
    return 15 + 2 * shape.max_top_k + sum(sizes[name] for name in columns if name in sizes)
