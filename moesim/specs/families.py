"""One reader per model family: where a config spells the MoE shape, and which layers it makes MoE layers.

To add a family, write one function from :class:`ConfigReader` to :class:`FamilyShape` and add its row to ``FAMILIES``.
Key names and layer rules follow each family's reference implementation in the transformers library; where a config
leaves a rule's key out, the reference's own default applies. Expert count, fan-out and width have no default.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from moesim.specs.attention import AttentionBlock, LatentAttention
from moesim.specs.attention_readers import (
    deepseek_v4_attention,
    gemma4_attention,
    grouped_query,
    jamba_attention,
    latent_attention,
    llama4_attention,
    qwen2_attention,
    qwen3_next_attention,
    repeated,
    sliding_by_layer_types,
)
from moesim.specs.config_reader import ConfigReader

Routing = Literal["topk", "hash"]


class FamilyShape(BaseModel):
    """What a family's reader takes from a config; the fields mean what they mean in ``ModelSpec``.

    ``ties_embeddings`` is what the reference does when the config does not say.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    n_hidden_layers: int
    moe_layers: tuple[int, ...]
    n_experts: tuple[int, ...]
    top_k: tuple[int, ...]
    expert_width: tuple[int, ...]
    attention: tuple[AttentionBlock, ...]
    routing: tuple[Routing, ...] | None = None
    n_identity_experts: int = 0
    n_shared_experts: int = 0
    shared_width: int = 0
    dense_width: int = 0
    n_dense_mlps_in_moe_layer: int = 0
    has_bias: bool = False
    has_gate: bool = True
    ties_embeddings: bool = False


def _n_layers(reader: ConfigReader) -> int:
    """Hidden layers of the decoder."""
    return reader.integer("num_hidden_layers", least=1)


def _sparse_step_layers(reader: ConfigReader) -> tuple[int, ...]:
    """Qwen rule: (index + 1) mod ``decoder_sparse_step`` is 0 and the layer is not in ``mlp_only_layers``."""
    step = reader.integer("decoder_sparse_step", default=1, least=1)
    excluded = reader.integers("mlp_only_layers") or ()
    return tuple(i for i in range(_n_layers(reader)) if (i + 1) % step == 0 and i not in excluded)


def _first_k_dense_layers(reader: ConfigReader, default: int) -> tuple[int, ...]:
    """DeepSeek rule: ``mlp_layer_types`` where given, else every ``moe_layer_freq``-th after the first k layers."""
    n_layers = _n_layers(reader)
    kinds = reader.names("mlp_layer_types", ("dense", "sparse", "moe"), n_layers)
    if kinds is not None:
        return tuple(i for i, kind in enumerate(kinds) if kind != "dense")
    first = reader.integer("first_k_dense_replace", default=default)
    frequency = reader.integer("moe_layer_freq", default=1, least=1)
    return tuple(i for i in range(first, n_layers) if i % frequency == 0)


def _mixtral(reader: ConfigReader) -> FamilyShape:
    """All layers; the experts' width is ``intermediate_size``. Also granitemoe with its optional shared MLP."""
    layers = range(_n_layers(reader))
    shared_width = reader.integer("shared_intermediate_size", default=0)
    return FamilyShape(
        n_hidden_layers=len(layers),
        moe_layers=tuple(layers),
        n_experts=reader.per_layer("num_local_experts", "num_experts", layers=layers),
        top_k=reader.per_layer("num_experts_per_tok", layers=layers),
        expert_width=reader.per_layer("intermediate_size", layers=layers),
        n_shared_experts=1 if shared_width else 0,
        shared_width=shared_width,
        attention=repeated(grouped_query(reader, window=reader.optional("sliding_window")), len(layers)),
    )


def _gpt_oss(reader: ConfigReader) -> FamilyShape:
    """As Mixtral, with biases on every matrix and windows on every other layer."""
    shape = _mixtral(reader)
    attention = sliding_by_layer_types(reader, default=lambda i: (i + 1) % 2 == 1, has_bias=True)
    return shape.model_copy(update={"attention": attention, "has_bias": True})


def _qwen_moe(reader: ConfigReader, layers: Sequence[int], attention: tuple[AttentionBlock, ...]) -> FamilyShape:
    """Read what all Qwen MoE generations share."""
    shared_width = reader.integer("shared_expert_intermediate_size", default=0)
    return FamilyShape(
        n_hidden_layers=_n_layers(reader),
        moe_layers=tuple(layers),
        n_experts=reader.per_layer("num_experts", "num_local_experts", layers=layers),
        top_k=reader.per_layer("num_experts_per_tok", layers=layers),
        expert_width=reader.per_layer("moe_intermediate_size", layers=layers),
        n_shared_experts=1 if shared_width else 0,
        shared_width=shared_width,
        dense_width=reader.integer("intermediate_size", default=0),
        attention=attention,
    )


def _qwen2_moe(reader: ConfigReader) -> FamilyShape:
    """Sparse-step rule, biased queries, keys and values, one gated shared expert."""
    return _qwen_moe(reader, _sparse_step_layers(reader), qwen2_attention(reader, has_bias=True))


def _qwen3_moe(reader: ConfigReader) -> FamilyShape:
    """Sparse-step rule without shared experts."""
    has_bias = reader.flag("attention_bias", default=False)
    return _qwen_moe(reader, _sparse_step_layers(reader), qwen2_attention(reader, has_bias=has_bias))


def _qwen3_next(reader: ConfigReader) -> FamilyShape:
    """Sparse-step rule; three of four layers have linear attention."""
    return _qwen_moe(reader, _sparse_step_layers(reader), qwen3_next_attention(reader))


def _deepseek(reader: ConfigReader, first_dense: int, attention: tuple[AttentionBlock, ...]) -> FamilyShape:
    """Read what DeepSeek-style families share: n_routed_experts, shared experts as multiples of the expert width."""
    layers = _first_k_dense_layers(reader, first_dense)
    width = reader.integer("moe_intermediate_size", least=1)
    n_shared = reader.integer("n_shared_experts", default=0)
    return FamilyShape(
        n_hidden_layers=_n_layers(reader),
        moe_layers=layers,
        n_experts=reader.per_layer("n_routed_experts", "num_experts", "num_local_experts", layers=layers),
        top_k=reader.per_layer("num_experts_per_tok", layers=layers),
        expert_width=(width,) * len(layers),
        n_shared_experts=n_shared,
        shared_width=n_shared * width,
        dense_width=reader.integer("intermediate_size", default=0),
        attention=attention,
    )


def _deepseek_v2(reader: ConfigReader) -> FamilyShape:
    """Latent attention; no leading dense layers unless the config says so."""
    return _deepseek(reader, 0, latent_attention(reader))


def _deepseek_v3(reader: ConfigReader) -> FamilyShape:
    """Latent attention (with an indexer in V3.2 and GLM-5); three leading dense layers unless stated."""
    return _deepseek(reader, 3, latent_attention(reader))


def _glm4_moe(reader: ConfigReader) -> FamilyShape:
    """Grouped-query attention; one leading dense layer unless stated."""
    return _deepseek(reader, 1, repeated(grouped_query(reader), _n_layers(reader)))


def _deepseek_v4(reader: ConfigReader) -> FamilyShape:
    """All layers are MoE; the first ``num_hash_layers`` (3 unless stated) pick experts by a table of token ids."""
    shape = _deepseek(
        ConfigReader({**reader.keys, "mlp_layer_types": None, "moe_layer_freq": 1}, reader.family, reader.file),
        0,
        deepseek_v4_attention(reader),
    )
    n_layers = shape.n_hidden_layers
    kinds = reader.names("mlp_layer_types", ("hash_moe", "moe"), n_layers)
    n_hash = reader.integer("num_hash_layers", default=3)
    is_hash = [kind == "hash_moe" for kind in kinds] if kinds else [layer < n_hash for layer in range(n_layers)]
    return shape.model_copy(update={"routing": tuple("hash" if hashed else "topk" for hashed in is_hash)})


def _ernie4_5_moe(reader: ConfigReader) -> FamilyShape:
    """MoE where (index + 1) mod interval is 0, between the start and end index (end -1 is the last layer)."""
    n_layers = _n_layers(reader)
    start = reader.integer("moe_layer_start_index", default=1)
    end = reader.integer("moe_layer_end_index", default=-1, least=-1)
    interval = reader.integer("moe_layer_interval", default=1, least=1)
    last = n_layers - 1 if end == -1 else min(end, n_layers - 1)
    layers = tuple(i for i in range(start, last + 1) if (i + 1) % interval == 0)
    width = reader.integer("moe_intermediate_size", least=1)
    n_shared = reader.integer("moe_num_shared_experts", default=0)
    has_bias = reader.flag("use_bias", default=False)
    return FamilyShape(
        n_hidden_layers=n_layers,
        moe_layers=layers,
        n_experts=reader.per_layer("moe_num_experts", layers=layers),
        top_k=reader.per_layer("moe_k", layers=layers),
        expert_width=(width,) * len(layers),
        n_shared_experts=n_shared,
        shared_width=n_shared * width,
        dense_width=reader.integer("intermediate_size", default=0),
        attention=repeated(grouped_query(reader, has_bias=has_bias), n_layers),
        has_bias=has_bias,
        ties_embeddings=True,
    )


def _hunyuan_v1_moe(reader: ConfigReader) -> FamilyShape:
    """Expert count, fan-out and width may be lists over the layers; one shared MLP of ``intermediate_size`` times."""
    n_layers = _n_layers(reader)
    layers = range(reader.integer("moe_layer_num_skipped", default=0), n_layers)
    n_shared = max(reader.per_layer("num_shared_expert", layers=layers, default=1), default=1)
    width = reader.integer("intermediate_size", least=1)
    return FamilyShape(
        n_hidden_layers=n_layers,
        moe_layers=tuple(layers),
        n_experts=reader.per_layer("num_experts", layers=layers),
        top_k=reader.per_layer("moe_topk", layers=layers),
        expert_width=reader.per_layer("moe_intermediate_size", layers=layers, default=width),
        n_shared_experts=n_shared,
        shared_width=n_shared * width,
        dense_width=width,
        attention=repeated(grouped_query(reader), n_layers),
    )


def _longcat_flash(reader: ConfigReader) -> FamilyShape:
    """``num_layers`` blocks, each with one MoE, two attentions and two dense MLPs; ids past the real ones are identity.

    ``num_hidden_layers`` counts attentions, so it is twice the number of MoE layers.
    """
    halves = reader.optional("num_hidden_layers")
    n_layers = reader.integer("num_layers", default=None if halves is None else halves // 2, least=1)
    layers = range(n_layers)
    attention = latent_attention(reader, n_layers=n_layers)
    doubled = tuple(
        block.model_copy(update={"n_blocks": 2}) if isinstance(block, LatentAttention) else block for block in attention
    )
    return FamilyShape(
        n_hidden_layers=n_layers,
        moe_layers=tuple(layers),
        n_experts=reader.per_layer("n_routed_experts", layers=layers),
        top_k=reader.per_layer("moe_topk", "num_experts_per_tok", layers=layers),
        expert_width=reader.per_layer("expert_ffn_hidden_size", layers=layers),
        n_identity_experts=reader.integer("zero_expert_num", default=0),
        dense_width=reader.integer("ffn_hidden_size", "intermediate_size", least=1),
        n_dense_mlps_in_moe_layer=2,
        attention=doubled,
    )


def _llama4(reader: ConfigReader) -> FamilyShape:
    """``moe_layers`` where given, else every ``interleave_moe_layer_step``-th; dense layers have their own width."""
    n_layers = _n_layers(reader)
    step = reader.integer("interleave_moe_layer_step", default=1, least=1)
    listed = reader.integers("moe_layers")
    layers = tuple(range(step - 1, n_layers, step)) if listed is None else tuple(sorted(listed))
    width = reader.integer("intermediate_size", least=1)
    return FamilyShape(
        n_hidden_layers=n_layers,
        moe_layers=layers,
        n_experts=reader.per_layer("num_local_experts", layers=layers),
        top_k=reader.per_layer("num_experts_per_tok", layers=layers),
        expert_width=(width,) * len(layers),
        n_shared_experts=1,
        shared_width=width,
        dense_width=reader.integer("intermediate_size_mlp", default=width),
        attention=llama4_attention(reader),
    )


def _jamba(reader: ConfigReader) -> FamilyShape:
    """MoE where index mod ``expert_layer_period`` is ``expert_layer_offset``; most layers are state space layers."""
    n_layers = _n_layers(reader)
    period = reader.integer("expert_layer_period", default=2, least=1)
    offset = reader.integer("expert_layer_offset", default=1)
    layers = tuple(i for i in range(n_layers) if i % period == offset)
    width = reader.integer("intermediate_size", least=1)
    return FamilyShape(
        n_hidden_layers=n_layers,
        moe_layers=layers,
        n_experts=reader.per_layer("num_experts", layers=layers),
        top_k=reader.per_layer("num_experts_per_tok", layers=layers),
        expert_width=(width,) * len(layers),
        dense_width=width,
        attention=jamba_attention(reader),
    )


def _gemma4(reader: ConfigReader) -> FamilyShape:
    """MoE in every layer beside its dense MLP, but only with ``enable_moe_block``, which is off by default."""
    if not reader.flag("enable_moe_block", default=False):
        raise reader.dense("enable_moe_block is not true")
    if reader.find("num_experts") is None or reader.find("moe_intermediate_size") is None:
        raise reader.dense("num_experts or moe_intermediate_size is null")
    layers = range(_n_layers(reader))
    return FamilyShape(
        n_hidden_layers=len(layers),
        moe_layers=tuple(layers),
        n_experts=reader.per_layer("num_experts", layers=layers),
        top_k=reader.per_layer("top_k_experts", layers=layers),
        expert_width=reader.per_layer("moe_intermediate_size", layers=layers),
        dense_width=reader.integer("intermediate_size", least=1),
        n_dense_mlps_in_moe_layer=1,
        attention=gemma4_attention(reader),
        ties_embeddings=True,
    )


FAMILIES: dict[str, Callable[[ConfigReader], FamilyShape]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v3,
    "deepseek_v4": _deepseek_v4,
    "ernie4_5_moe": _ernie4_5_moe,
    "gemma4": _gemma4,
    "glm4_moe": _glm4_moe,
    "glm4v_moe": _glm4_moe,
    "glm_moe_dsa": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "granitemoe": _mixtral,
    "granitemoeshared": _mixtral,
    "hunyuan_v1_moe": _hunyuan_v1_moe,
    "jamba": _jamba,
    "kimi_k2": _deepseek_v3,
    "llama4": _llama4,
    "longcat_flash": _longcat_flash,
    "minimax_m2": _mixtral,
    "mixtral": _mixtral,
    "olmoe": _mixtral,
    "phimoe": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_5_moe": _qwen3_next,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_vl_moe": _qwen3_moe,
}

# Dense families that people try; the message can then say so instead of "unknown".
DENSE_FAMILIES = frozenset(
    {
        "cohere", "cohere2", "falcon", "gemma", "gemma2", "gemma3", "glm", "glm4", "gpt2", "gpt_neox", "granite",
        "llama", "mistral", "olmo", "olmo2", "olmo3", "opt", "phi", "phi3", "qwen2", "qwen3", "smollm3", "stablelm",
        "starcoder2",
    }
)  # fmt: skip
