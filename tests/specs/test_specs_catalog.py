"""The models of the catalog, and the attention that families' rules give."""

from typing import Any

import pytest

from moesim.specs import CompressedAttention, list_models, load_model, spec_from_config


def test_catalog_holds_the_documented_models() -> None:
    """The catalog covers the models that results are published for."""
    assert list_models() == (
        "deepseek-v3", "deepseek-v4-flash", "glm-5", "glm-5-w4a8c8", "gpt-oss-120b", "gpt-oss-20b", "mixtral-8x7b",
        "olmoe-1b-7b", "qwen3-235b-a22b", "qwen3-30b-a3b", "tiny-moe",
    )  # fmt: skip


# Totals that the publishers state, in billions of parameters.
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("deepseek-v3", 671),
        ("deepseek-v4-flash", 284),
        ("glm-5", 744),
        ("gpt-oss-120b", 116.8),
        ("gpt-oss-20b", 20.9),
        ("mixtral-8x7b", 46.7),
        ("olmoe-1b-7b", 6.92),
        ("qwen3-235b-a22b", 235),
        ("qwen3-30b-a3b", 30.5),
    ],
)
def test_parameter_totals_match_what_is_published(name: str, published: float) -> None:
    """All formulas together give the published parameter counts within 0.3 %."""
    assert load_model(name).n_parameters == pytest.approx(published * 1e9, rel=3e-3)


def test_tiny_moe_total_is_exact() -> None:
    """The tiny model has 7,147,648 weights, of which 2,048 are norms inside attention."""
    spec = load_model("tiny-moe")
    assert spec.n_parameters == 7_147_648 - 2_048
    assert (spec.n_layers, spec.n_experts[0], spec.top_k[0], spec.expert_bytes[0]) == (8, 64, 4, 24_576)


@pytest.mark.parametrize(
    ("name", "n_layers", "n_experts", "top_k", "n_bytes"),
    [
        ("deepseek-v3", 58, 256, 8, 44_050_944),
        ("deepseek-v4-flash", 43, 256, 6, 13_369_344),
        ("glm-5", 75, 256, 8, 75_497_472),
        ("glm-5-w4a8c8", 75, 256, 8, 18_874_368),
        ("gpt-oss-120b", 36, 128, 4, 13_236_480),
        ("gpt-oss-20b", 24, 32, 4, 13_236_480),
        ("mixtral-8x7b", 32, 8, 2, 352_321_536),
        ("olmoe-1b-7b", 16, 64, 8, 12_582_912),
        ("qwen3-235b-a22b", 94, 128, 8, 37_748_736),
        ("qwen3-30b-a3b", 48, 128, 8, 9_437_184),
        ("tiny-moe", 8, 64, 4, 24_576),
    ],
)
def test_catalog_reference_shapes(name: str, n_layers: int, n_experts: int, top_k: int, n_bytes: int) -> None:
    """Catalog models have their published shapes and expert sizes."""
    spec = load_model(name)
    assert (spec.n_layers, spec.n_experts[0], spec.top_k[0]) == (n_layers, n_experts, top_k)
    assert set(spec.expert_bytes) == {n_bytes}


def test_catalog_attention_shapes() -> None:
    """Windows, hash layers and compression sit on the layers where the configs put them."""
    oss = load_model("gpt-oss-20b")
    assert [oss.attention_window(layer) for layer in range(4)] == [128, None, 128, None]
    flash = load_model("deepseek-v4-flash")
    assert flash.routing[:4] == ("hash", "hash", "hash", "topk")
    ratios = [block.compress_ratio for block in flash.attention if isinstance(block, CompressedAttention)]
    assert ratios == [0, 0, *[4, 128] * 20, 4]
    assert load_model("glm-5").moe_layers == tuple(range(3, 78))
    assert load_model("glm-5-w4a8c8").kv_bytes_per_token(0) == 512 + 64 + 128
    assert load_model("deepseek-v3").kv_bytes_per_token(0) == 2 * (512 + 64)


@pytest.mark.parametrize("name", list_models())
def test_catalog_models_load(name: str) -> None:
    """Every catalog model loads under its file's name, in any case, with a source and complete attention."""
    spec = load_model(name.upper())
    assert (spec.name, len(spec.attention)) == (name, spec.n_hidden_layers)
    assert len(spec.source) > 20
    assert spec.resident_bytes > 0


def test_sliding_rules_of_families() -> None:
    """Qwen2 windows need their switch, Llama 4 has full attention every fourth layer, Gemma-4 every sixth."""
    body = {
        "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 9, "num_hidden_layers": 6, "num_experts": 8,
        "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "intermediate_size": 8,
        "sliding_window": 32, "attention_chunk_size": 64, "max_window_layers": 3, "enable_moe_block": True,
        "top_k_experts": 2, "global_head_dim": 32,
    }  # fmt: skip

    def windows(model_type: str, **changes: Any) -> list[int | None]:
        config = {**body, "model_type": model_type, **changes}
        spec = spec_from_config(config, file="config.json", name="m", source="test")
        return [spec.attention_window(layer) for layer in range(6)]

    assert windows("qwen2_moe") == [None] * 6
    assert windows("qwen2_moe", use_sliding_window=True) == [32, None, 32, None, None, None]
    assert windows("llama4", sliding_window=None) == [64, 64, 64, None, 64, 64]
    assert windows("gemma4") == [32] * 5 + [None]
    assert windows("gpt_oss", layer_types=["full_attention"] * 5 + ["sliding_attention"]) == [None] * 5 + [32]
    assert windows("mixtral", sliding_window=7) == [7] * 6


def test_gemma4_full_layers_have_their_own_heads() -> None:
    """Gemma-4's full layers are wider, share one projection, and may have fewer key-value heads."""
    config = {
        "model_type": "gemma4", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 9, "num_hidden_layers": 6, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 8,
        "intermediate_size": 8, "sliding_window": 32, "enable_moe_block": True, "global_head_dim": 32,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    }  # fmt: skip
    spec = spec_from_config(config, file="config.json", name="m", source="test")
    assert spec.attention_parameters(0) == 64 * (64 + 64) + 64 * 64
    assert spec.attention_parameters(5) == 64 * (128 + 32) + 128 * 64
    assert (spec.n_dense_mlps(0), spec.dense_mlp_bytes) == (1, 3 * 64 * 8 * 2)
