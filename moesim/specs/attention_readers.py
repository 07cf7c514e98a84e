"""The attention of each family, one block per layer, from its config."""

from collections.abc import Callable

from moesim.specs.attention import (
    AttentionBlock,
    CompressedAttention,
    GroupedQueryAttention,
    LatentAttention,
    LinearAttention,
    MambaMixer,
)
from moesim.specs.config_reader import ConfigReader

Blocks = tuple[AttentionBlock, ...]

_COMPRESS_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def repeated(block: AttentionBlock, n_layers: int) -> Blocks:
    """Give every layer the same block."""
    return (block,) * n_layers


def grouped_query(
    reader: ConfigReader, *, window: int | None = None, has_bias: bool | None = None
) -> GroupedQueryAttention:
    """Read grouped-query attention: key-value heads default to all heads, the head width to hidden size / heads.

    Raises
    ------
    ConfigError
        If ``num_attention_heads`` or ``hidden_size`` is missing.
    """
    n_heads = reader.integer("num_attention_heads", least=1)
    return GroupedQueryAttention(
        n_heads=n_heads,
        n_kv_heads=reader.integer("num_key_value_heads", default=n_heads, least=1),
        head_dim=reader.optional("head_dim") or reader.integer("hidden_size", least=1) // n_heads,
        window=window,
        has_bias=reader.flag("attention_bias", default=False) if has_bias is None else has_bias,
    )


def sliding_by_layer_types(
    reader: ConfigReader, *, default: Callable[[int], bool], has_bias: bool | None = None
) -> Blocks:
    """Read windows from ``layer_types``; without the list, ``default`` says which layers have one."""
    n_layers = reader.integer("num_hidden_layers", least=1)
    kinds = reader.names("layer_types", ("sliding_attention", "chunked_attention", "full_attention"), n_layers)
    is_sliding = [kind != "full_attention" for kind in kinds] if kinds else [default(i) for i in range(n_layers)]
    full = grouped_query(reader, has_bias=has_bias)
    sliding = grouped_query(reader, window=reader.optional("sliding_window", "attention_chunk_size"), has_bias=has_bias)
    return tuple(sliding if narrow else full for narrow in is_sliding)


def qwen2_attention(reader: ConfigReader, *, has_bias: bool) -> Blocks:
    """Full attention everywhere unless ``use_sliding_window`` is on."""
    n_layers = reader.integer("num_hidden_layers", least=1)
    if not reader.flag("use_sliding_window", default=False):
        return repeated(grouped_query(reader, has_bias=has_bias), n_layers)
    n_window_layers = reader.integer("max_window_layers", default=n_layers)
    return sliding_by_layer_types(reader, default=lambda i: (i + 1) % 2 == 1 and i < n_window_layers, has_bias=has_bias)


def llama4_attention(reader: ConfigReader) -> Blocks:
    """Chunked attention except on every ``no_rope_layer_interval``-th layer."""
    interval = reader.integer("no_rope_layer_interval", default=4, least=1)
    uses_rope = reader.integers("no_rope_layers")
    return sliding_by_layer_types(reader, default=lambda i: bool(uses_rope[i] if uses_rope else (i + 1) % interval))


def gemma4_attention(reader: ConfigReader) -> Blocks:
    """Five windowed layers, then a full one with wider heads, maybe fewer key-value heads, and a shared projection."""
    n_layers = reader.integer("num_hidden_layers", least=1)
    blocks = sliding_by_layer_types(reader, default=lambda i: (i + 1) % 6 != 0 and i != n_layers - 1)
    shares = reader.flag("attention_k_eq_v", default=False)
    full = {"head_dim": reader.integer("global_head_dim", default=512, least=1), "shares_kv_projection": shares}
    n_kv_heads = reader.optional("num_global_key_value_heads")
    if shares and n_kv_heads is not None:
        full["n_kv_heads"] = n_kv_heads
    return tuple(block if block.window else block.model_copy(update=full) for block in blocks)


def latent_attention(reader: ConfigReader, n_layers: int | None = None) -> Blocks:
    """Read multi-head latent attention, with the sparse indexer where ``index_topk`` is set."""
    index_topk = reader.optional("index_topk")
    block = LatentAttention(
        n_heads=reader.integer("num_attention_heads", least=1),
        q_lora_rank=reader.optional("q_lora_rank"),
        kv_lora_rank=reader.integer("kv_lora_rank", least=1),
        qk_nope_head_dim=reader.integer("qk_nope_head_dim", least=1),
        qk_rope_head_dim=reader.integer("qk_rope_head_dim", least=1),
        v_head_dim=reader.integer("v_head_dim", least=1),
        index_n_heads=reader.integer("index_n_heads", least=1) if index_topk else 0,
        index_head_dim=reader.integer("index_head_dim", least=1) if index_topk else 0,
        index_topk=index_topk,
    )
    return repeated(block, n_layers or reader.integer("num_hidden_layers", least=1))


def deepseek_v4_attention(reader: ConfigReader) -> Blocks:
    """Read the compression of each layer from ``layer_types`` or ``compress_ratios``.

    Without either, two heavily compressed layers lead and the two kinds alternate, as in the reference. Ratio lists
    are longer than the model: the tail belongs to the extra prediction modules.
    """
    n_layers = reader.integer("num_hidden_layers", least=1)
    kinds = reader.names("layer_types", _COMPRESS_RATIOS, n_layers)
    listed = reader.integers("compress_ratios")
    if kinds is not None:
        ratios = [_COMPRESS_RATIOS[kind] for kind in kinds]
    elif listed is not None:
        if len(listed) < n_layers:
            raise reader.error(f"compress_ratios lists {len(listed)} layers, needed: {n_layers}")
        ratios = list(listed[:n_layers])
    else:
        ratios = [128, 128, *(4 if i % 2 else 128 for i in range(max(n_layers - 2, 0)))][:n_layers]
    return tuple(_deepseek_v4_block(reader, ratio) for ratio in ratios)


def _deepseek_v4_block(reader: ConfigReader, ratio: int) -> CompressedAttention:
    """Build one layer's block; only the 4:1 compression has an indexer."""
    has_index = ratio == _COMPRESS_RATIOS["compressed_sparse_attention"]
    return CompressedAttention(
        n_heads=reader.integer("num_attention_heads", least=1),
        head_dim=reader.integer("head_dim", least=1),
        q_lora_rank=reader.integer("q_lora_rank", least=1),
        o_groups=reader.integer("o_groups", least=1),
        o_lora_rank=reader.integer("o_lora_rank", least=1),
        window=reader.integer("sliding_window", least=1),
        compress_ratio=ratio,
        index_n_heads=reader.integer("index_n_heads", least=1) if has_index else 0,
        index_head_dim=reader.integer("index_head_dim", least=1) if has_index else 0,
        index_topk=reader.integer("index_topk", least=1) if has_index else None,
    )


def qwen3_next_attention(reader: ConfigReader) -> Blocks:
    """Every ``full_attention_interval``-th layer is full attention with an output gate, the rest are linear."""
    n_layers = reader.integer("num_hidden_layers", least=1)
    interval = reader.integer("full_attention_interval", default=4, least=1)
    kinds = reader.names("layer_types", ("linear_attention", "full_attention"), n_layers)
    full = grouped_query(reader).model_copy(update={"has_output_gate": True})
    linear = LinearAttention(
        n_key_heads=reader.integer("linear_num_key_heads", least=1),
        n_value_heads=reader.integer("linear_num_value_heads", least=1),
        key_head_dim=reader.integer("linear_key_head_dim", least=1),
        value_head_dim=reader.integer("linear_value_head_dim", least=1),
        conv_width=reader.integer("linear_conv_kernel_dim", default=4, least=1),
    )
    is_linear = (
        [kind == "linear_attention" for kind in kinds] if kinds else [(i + 1) % interval != 0 for i in range(n_layers)]
    )
    return tuple(linear if flag else full for flag in is_linear)


def jamba_attention(reader: ConfigReader) -> Blocks:
    """Attention where index mod ``attn_layer_period`` is ``attn_layer_offset``, state space layers elsewhere."""
    n_layers = reader.integer("num_hidden_layers", least=1)
    hidden_size = reader.integer("hidden_size", least=1)
    period = reader.integer("attn_layer_period", default=8, least=1)
    offset = reader.integer("attn_layer_offset", default=4)
    # The reference spells the automatic rank as the text "auto".
    rank = reader.find("mamba_dt_rank")
    mamba = MambaMixer(
        inner_size=hidden_size * reader.integer("mamba_expand", default=2, least=1),
        state_size=reader.integer("mamba_d_state", default=16, least=1),
        conv_width=reader.integer("mamba_d_conv", default=4, least=1),
        dt_rank=-(-hidden_size // 16) if rank in {None, "auto"} else reader.integer("mamba_dt_rank", least=1),
    )
    attention = grouped_query(reader, window=reader.optional("sliding_window"))
    return tuple(attention if i % period == offset else mamba for i in range(n_layers))
