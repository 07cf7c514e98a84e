"""Tiny random models of every text family with routed experts that the installed library can start."""

from typing import Any

import torch
from torch import nn

from profiler.record.model import LoadedModel
from profiler.routers.adapters import draw_missing

VOCABULARY = 128

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "unpadded_vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 32, "num_hidden_layers": 4,
    "dense_intermediate_size": 48, "intermediate_size_mlp": 48, "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32, "hidden_size_per_layer_input": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "model_max_length": 128, "sliding_window": 64,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2,
    "n_group": 1, "topk_group": 1, "num_expert_group": 1, "n_shared_experts": 1, "num_shared_experts": 1,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "first_k_dense_replace": 1, "index_topk": 32, "index_head_dim": 16, "index_n_heads": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_head_dim": 16, "linear_num_heads": 4, "num_nextn_predict_layers": 0, "router_hidden_size": 16,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
    "ssm_state_size": 16, "mamba_n_groups": 1, "n_groups": 1, "d_rel": 4, "rel_extent": 64,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 32,
    "indexer_compress_ratio": 4, "hc_lowrank": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip

_MIXED = {"layer_types": ["linear_attention", "full_attention"] * 2}

# What a family needs beyond the small sizes: lists per layer, nested parts, and at least two MoE layers.
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {}, "aria_text": {}, "axk1": {}, "axk2": {},
    "bailing_hybrid": {**_MIXED, "num_key_value_heads": 4},
    "beam": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "cohere2_moe": {},
    "dbrx": {
        "d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v2": {}, "deepseek_v3": {"n_group": 4, "topk_group": 2}, "deepseek_v32": {},
    "deepseek_v4": {
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"], "o_lora_rank": 16, "o_groups": 2,
        "layer_types": [
            "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention",
        ],
        "num_key_value_heads": 1,
    },
    "dots1": {}, "dots3_note_text": {"per_layer_config": None, "head_dim": 24},
    "ernie4_5_moe": {}, "exaone_moe": {}, "flex_olmo": {}, "flint": {},
    "gemma4_text": {
        "enable_moe_block": True, "per_layer_config": None, "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "glm4_moe": {}, "glm4_moe_lite": {}, "glm_moe_dsa": {}, "gpt_oss": {}, "granitemoe": {}, "granitemoe_swa": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2}, "granitemoeshared": {},
    "hunyuan_v1_moe": {}, "hy_v3": {}, "hy_v4": {},
    "inkling2_text": {"n_layers_per_attn_res_block": 2, "layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "inkling_text": {"n_shared_experts": 2},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0,
        "mamba_d_state": 8, "mamba_dt_rank": 8,
    },
    "jetmoe": {"kv_channels": 16}, "kimi_linear": _MIXED, "kolibri1": {}, "laguna": {}, "lara_mini": {},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "llama4_text": {}, "longcat_flash": {
        "num_layers": 4, "head_dim": 8, "num_key_value_heads": 4, "zero_expert_num": 4, "expert_ffn_hidden_size": 32,
        "ffn_hidden_size": 48, "moe_topk": 3,
    },
    "mellum": {}, "mimo_v2_flash": {}, "minimax": {}, "minimax_m2": {}, "minimax_m3_vl_text": {}, "mixtral": {},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "moe"]},
    "olmoe": {}, "phimoe": {}, "qwen2_moe": {}, "qwen3_5_moe_text": {}, "qwen3_moe": {}, "qwen3_next": {},
    "qwen4_exp_text": {}, "sarvam_mla": {}, "sarvam_moe": {}, "solar_open": {}, "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

REQUIRED = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "deepseek_v4", "glm4_moe",
    "glm_moe_dsa", "gpt_oss", "granitemoe", "phimoe", "ernie4_5_moe", "hunyuan_v1_moe", "minimax_m2",
    "llama4_text", "longcat_flash", "qwen3_next", "jamba",
)  # fmt: skip


def tiny_config(family: str, **changes: Any) -> Any:
    """Give a family's configuration, shrunk."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415

    kind = CONFIG_MAPPING[family]
    known = set(kind().to_dict()) | set(getattr(kind, "__annotations__", {}))
    values = {name: value for name, value in _SMALL.items() if name in known}
    if "kv_lora_rank" in values:
        # Multi-head latent attention has one key per head, and a head size of its own.
        values["num_key_value_heads"] = 4
        values.pop("head_dim", None)
    return kind(**(values | FAMILIES.get(family, {}) | changes))


def tiny_model(family: str, seed: int = 0, dtype: str = "float32", **changes: Any) -> Any:
    """Build a random model of a family whose selection biases are not zero."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.set_verbosity_error()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tiny_config(family, **changes)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval().requires_grad_(False)
        draw_missing(model, torch.Generator().manual_seed(seed), 0.2)
        _draw_biases(model)
    return model


def _draw_biases(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "bias" in name.rpartition(".")[2] and tensor.is_floating_point() and 8 <= tensor.numel() <= 12:
            tensor.data.copy_(torch.randn_like(tensor) * 0.3)


def as_loaded(model: Any, family: str = "mixtral") -> LoadedModel:
    """Wrap a model as the recorder wants it."""
    return LoadedModel(
        model=model,
        encode=lambda text: [byte % VOCABULARY for byte in text.encode()],
        name=f"tiny-{family}",
        family=family,
        vocabulary=VOCABULARY,
        eos_ids=frozenset(),
        pad_id=0,
        max_tokens=128,
        is_random=True,
        note="random weights",
        fingerprint="",
    )
