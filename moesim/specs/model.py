"""What a model is: its MoE layers, the bytes of an expert, and what else a step reads."""

from collections.abc import Iterable
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moesim.errors import ConfigError
from moesim.specs.attention import AttentionBlock
from moesim.specs.families import Routing
from moesim.specs.formats import ExpertFormat

# Fields with one entry per MoE layer: a single value in a file means the same in every layer.
_PER_MOE_LAYER = ("n_experts", "top_k", "expert_width", "routing", "expert_bytes")


class ModelSpec(BaseModel):
    """Shapes and bytes of one Mixture-of-Experts model.

    L is the number of MoE layers. A *model layer* is an index into all hidden layers, an *MoE layer* an index into
    ``moe_layers``. Values given as a single number (or block) stand for every layer.

    Parameters
    ----------
    name, family, source : str
        ``source`` says where the numbers are from: an address, a file, or "derived from trace".
    notes : tuple of str
        What the reader of a report should know: assumed numbers, claims that tensors overruled.
    hidden_size, n_hidden_layers : int
        H and the number of model layers, dense ones included.
    moe_layers : tuple of int, length L
        Model layer of each MoE layer, ascending.
    n_experts, top_k, expert_width : tuple of int, length L
        E, k and I of each MoE layer; identity experts not counted in E.
    n_identity_experts : int
        Ids from ``n_experts[l]`` on that stand for "pass through": no weights, no slot.
    routing : tuple of {"topk", "hash"}, length L
        Whether the router's scores or the token id pick the experts.
    n_shared_experts, shared_width : int
        Experts that every token uses, and the width of all of them together.
    expert_bytes : tuple of int, length L
        Bytes of one routed expert with scales and biases; from ``expert_format`` when left out.
    expert_format : ExpertFormat
        How an expert is stored.
    expert_bytes_source : {"formula", "safetensors", "stated"}
        Where ``expert_bytes`` is from.
    dense_width, n_dense_mlps_in_moe_layer : int
        Width of a dense MLP; how many of them an MoE layer has beside its experts.
    vocab_size : int
    tie_word_embeddings : bool
        Whether the output head is the embedding.
    weight_bits, unquantized_bits, kv_bits : int
        Bits of attention, shared experts and dense MLPs; of routers, norms, embedding and head; of cache entries.
    attention : tuple of AttentionBlock
        One per model layer; empty when unknown, which makes every question about attention an error.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    family: str
    source: str = Field(min_length=1)
    notes: tuple[str, ...] = ()
    hidden_size: int = Field(ge=1)
    n_hidden_layers: int = Field(ge=1)
    moe_layers: tuple[int, ...] = Field(min_length=1)
    n_experts: tuple[int, ...]
    top_k: tuple[int, ...]
    expert_width: tuple[int, ...]
    n_identity_experts: int = Field(default=0, ge=0)
    routing: tuple[Routing, ...] = ()
    n_shared_experts: int = Field(default=0, ge=0)
    shared_width: int = Field(default=0, ge=0)
    expert_bytes: tuple[int, ...] = ()
    expert_format: ExpertFormat
    expert_bytes_source: Literal["formula", "safetensors", "stated"] = "formula"
    dense_width: int = Field(default=0, ge=0)
    n_dense_mlps_in_moe_layer: int = Field(default=0, ge=0)
    vocab_size: int = Field(ge=1)
    tie_word_embeddings: bool = False
    weight_bits: int = Field(default=16, ge=1, le=32)
    unquantized_bits: int = Field(default=16, ge=1, le=32)
    kv_bits: int = Field(default=16, ge=1, le=32)
    attention: tuple[AttentionBlock, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        """Spread single values over the layers and compute expert bytes that were left out."""
        if not isinstance(values, dict) or not isinstance(values.get("moe_layers"), (list, tuple)):
            return values
        n_layers = len(values["moe_layers"])
        filled = {"routing": "topk", **values}
        for field in _PER_MOE_LAYER:
            if isinstance(filled.get(field), (int, str)):
                filled[field] = (filled[field],) * n_layers
        if isinstance(filled.get("attention"), (dict, BaseModel)):
            filled["attention"] = (filled["attention"],) * int(filled.get("n_hidden_layers", 1))
        if filled.get("expert_bytes"):
            filled.setdefault("expert_bytes_source", "stated")
        elif "expert_format" in filled:
            filled["expert_bytes"] = cls._expert_bytes_from_format(filled)
        return filled

    @staticmethod
    def _expert_bytes_from_format(values: dict[str, Any]) -> tuple[int, ...]:
        """Apply the formula to each layer; nothing where a size is missing or no number, which is reported later."""
        hidden_size, widths = values.get("hidden_size"), values.get("expert_width") or ()
        if not isinstance(hidden_size, int) or not all(isinstance(width, int) for width in widths):
            return ()
        stored = ExpertFormat.model_validate(values["expert_format"])
        return tuple(stored.expert_bytes(hidden_size, width) for width in widths)

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse layers that do not fit together."""
        if list(self.moe_layers) != sorted(set(self.moe_layers)):
            raise ValueError(f"moe_layers is {self.moe_layers}, allowed: ascending, each once")
        if self.moe_layers[0] < 0 or self.moe_layers[-1] >= self.n_hidden_layers:
            raise ValueError(f"moe_layers is {self.moe_layers}, allowed: 0 to {self.n_hidden_layers - 1}")
        for field in _PER_MOE_LAYER:
            values = getattr(self, field)
            if len(values) != self.n_layers:
                raise ValueError(f"{field} has {len(values)} entries, allowed: {self.n_layers}, one per MoE layer")
            if field != "routing" and min(values) < 1:
                raise ValueError(f"{field} holds {min(values)}, allowed: 1 and more")
        for n_experts, top_k in zip(self.n_experts, self.top_k, strict=True):
            if top_k > n_experts + self.n_identity_experts:
                raise ValueError(f"top_k is {top_k}, allowed: at most the {n_experts} experts of its layer")
        if self.attention and len(self.attention) != self.n_hidden_layers:
            raise ValueError(f"attention has {len(self.attention)} entries, allowed: {self.n_hidden_layers} or one")
        if self.dense_width == 0 and (self.n_layers < self.n_hidden_layers or self.n_dense_mlps_in_moe_layer):
            raise ValueError("dense_width is 0, allowed: 1 and more, since the model has dense MLPs")
        return self

    @property
    def n_layers(self) -> int:
        """L, MoE layers only."""
        return len(self.moe_layers)

    @property
    def max_n_experts(self) -> int:
        """The largest E of any layer."""
        return max(self.n_experts)

    @property
    def max_top_k(self) -> int:
        """The largest k of any layer."""
        return max(self.top_k)

    def expert_parameters(self, layer: int) -> int:
        """Weights and biases of one routed expert of MoE layer ``layer``: 3 H I, 2 H I without a gate."""
        return self.expert_format.expert_parameters(self.hidden_size, self.expert_width[layer])

    def layer_bytes(self, layer: int) -> int:
        """Bytes of all routed experts of MoE layer ``layer``: E times the bytes of one."""
        return self.n_experts[layer] * self.expert_bytes[layer]

    @property
    def routed_bytes(self) -> int:
        """Bytes of all routed experts of the model."""
        return sum(self.layer_bytes(layer) for layer in range(self.n_layers))

    def _attention_block(self, model_layer: int) -> AttentionBlock:
        """Return a layer's attention, or say that it is unknown."""
        if not self.attention:
            raise ConfigError(
                f"model {self.name!r} ({self.source}): attention is not given; add the attention shape to its spec"
            )
        return self.attention[model_layer]

    def attention_parameters(self, model_layer: int) -> int:
        """Weights of the attention of a model layer; formulas in :mod:`moesim.specs.attention`."""
        return self._attention_block(model_layer).n_parameters(self.hidden_size)

    def attention_bytes(self, model_layer: int) -> int:
        """Bytes of the attention weights of a model layer: parameters x ``weight_bits`` / 8.

        Block scales of quantised attention (under 0.1 % at 128 x 128) are left out.
        """
        return _bytes(self.attention_parameters(model_layer), self.weight_bits)

    def attention_window(self, model_layer: int) -> int | None:
        """Tokens that a model layer looks back on at full resolution; None for all of them."""
        return self._attention_block(model_layer).window

    def kv_bytes_per_token(self, model_layer: int) -> int:
        """Cache bytes that one token inside the window adds to a model layer; 0 for layers with a fixed state.

        Grouped-query 2 n_kv d, latent r_kv + d_rope (+ indexer key), DeepSeek-V4 d, each x ``kv_bits`` / 8.
        """
        return _bytes(self._attention_block(model_layer).kv_values_per_token, self.kv_bits)

    def kv_read_bytes(self, model_layer: int, n_context_tokens: int) -> int:
        """Cache bytes that one decode step reads in a model layer after ``n_context_tokens`` tokens.

        Exact where :meth:`kv_bytes_per_token` times the window is not: sparse indexers, compression, fixed states.
        """
        return _bytes(self._attention_block(model_layer).kv_values_read(n_context_tokens), self.kv_bits)

    def kv_cache_bytes(self, n_context_tokens: int) -> int:
        """Cache bytes of all model layers together that one request keeps after ``n_context_tokens`` tokens."""
        kept = (self._attention_block(layer).kv_values_kept(n_context_tokens) for layer in range(self.n_hidden_layers))
        return sum(_bytes(n_values, self.kv_bits) for n_values in kept)

    @property
    def shared_expert_parameters(self) -> int:
        """Weights of all shared experts of one MoE layer: 3 H x ``shared_width`` (2 without a gate)."""
        return (3 if self.expert_format.has_gate else 2) * self.hidden_size * self.shared_width

    @property
    def shared_expert_bytes(self) -> int:
        """Bytes of all shared experts of one MoE layer, at ``weight_bits``."""
        return _bytes(self.shared_expert_parameters, self.weight_bits)

    def router_parameters(self, layer: int) -> int:
        """Weights of the router of MoE layer ``layer``: H x (E + identity experts); its bias is left out."""
        return self.hidden_size * (self.n_experts[layer] + self.n_identity_experts)

    def router_bytes(self, layer: int) -> int:
        """Bytes of the router of MoE layer ``layer``, at ``unquantized_bits``."""
        return _bytes(self.router_parameters(layer), self.unquantized_bits)

    @property
    def dense_mlp_parameters(self) -> int:
        """Weights of one dense MLP: 3 H x ``dense_width`` (2 without a gate), 0 when the model has none."""
        has_dense = self.n_layers < self.n_hidden_layers or self.n_dense_mlps_in_moe_layer > 0
        n_matrices = 3 if self.expert_format.has_gate else 2
        return n_matrices * self.hidden_size * self.dense_width if has_dense else 0

    @property
    def dense_mlp_bytes(self) -> int:
        """Bytes of one dense MLP, at ``weight_bits``."""
        return _bytes(self.dense_mlp_parameters, self.weight_bits)

    def n_dense_mlps(self, model_layer: int) -> int:
        """Dense MLPs of a model layer: 1 in a dense layer, ``n_dense_mlps_in_moe_layer`` in an MoE layer."""
        return self.n_dense_mlps_in_moe_layer if model_layer in self.moe_layers else 1

    @property
    def head_parameters(self) -> int:
        """Weights of the output head: H x vocabulary."""
        return self.hidden_size * self.vocab_size

    @property
    def head_bytes(self) -> int:
        """Bytes of the output head that a step reads, tied or not, at ``unquantized_bits``."""
        return _bytes(self.head_parameters, self.unquantized_bits)

    @property
    def n_parameters(self) -> int:
        """All weights: routed experts, and everything that :attr:`resident_bytes` counts."""
        routed = sum(self.n_experts[layer] * self.expert_parameters(layer) for layer in range(self.n_layers))
        routers = sum(self.router_parameters(layer) for layer in range(self.n_layers))
        return routed + routers + self._n_quantized_parameters + self._n_embedding_and_norm_parameters

    @property
    def _n_quantized_parameters(self) -> int:
        """Attention, shared experts and dense MLPs of all layers."""
        layers = range(self.n_hidden_layers)
        attention = sum(self.attention_parameters(layer) for layer in layers)
        dense = sum(self.n_dense_mlps(layer) for layer in layers) * self.dense_mlp_parameters
        return attention + dense + self.n_layers * self.shared_expert_parameters

    @property
    def _n_embedding_and_norm_parameters(self) -> int:
        """Embedding, head unless tied, two norms a layer and the last one."""
        n_tables = 1 if self.tie_word_embeddings else 2
        return n_tables * self.head_parameters + (2 * self.n_hidden_layers + 1) * self.hidden_size

    @property
    def resident_bytes(self) -> int:
        """Bytes of everything but routed experts.

        Attention, dense MLPs and shared experts at ``weight_bits``; routers, embedding, head (once when tied) and norms
        at ``unquantized_bits``. Extra prediction modules, vision towers and norms inside attention are left out.
        """
        routers = sum(self.router_bytes(layer) for layer in range(self.n_layers))
        quantized = _bytes(self._n_quantized_parameters, self.weight_bits)
        return routers + quantized + _bytes(self._n_embedding_and_norm_parameters, self.unquantized_bits)

    def with_overrides(
        self,
        top_k: int | Iterable[int] | None = None,
        expert_bytes: int | Iterable[int] | None = None,
    ) -> "ModelSpec":
        """Return a copy with another fan-out or expert size, which is then "stated" and noted.

        Parameters
        ----------
        top_k, expert_bytes : int or iterable of int, optional
            One for all MoE layers, or one per MoE layer.

        Raises
        ------
        ConfigError
            If a value does not fit the model.
        """
        changes: dict[str, Any] = {}
        if top_k is not None:
            changes["top_k"] = top_k if isinstance(top_k, int) else tuple(top_k)
        if expert_bytes is not None:
            changes["expert_bytes"] = expert_bytes if isinstance(expert_bytes, int) else tuple(expert_bytes)
            changes["expert_bytes_source"] = "stated"
        if not changes:
            return self
        notes = (
            *self.notes,
            *(f"{field} overridden: {value}" for field, value in changes.items() if "source" not in field),
        )
        kept = {field: getattr(self, field) for field in type(self).model_fields}
        try:
            return ModelSpec.model_validate({**kept, **changes, "notes": notes})
        except ValueError as problem:
            raise ConfigError(f"override of model {self.name!r}: {problem}") from problem


def _bytes(n_values: int, bits: int) -> int:
    """Bytes of so many packed values, rounded up once."""
    return -(-n_values * bits // 8)
