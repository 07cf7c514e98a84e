"""Model specs: derived sizes, checks, overrides, TOML files, the catalog."""

import json
from pathlib import Path
from typing import Any

import pytest

from moesim.errors import ConfigError, UnknownNameError
from moesim.specs import (
    CompressedAttention,
    ExpertFormat,
    GroupedQueryAttention,
    LatentAttention,
    LinearAttention,
    MambaMixer,
    ModelSpec,
    load_model,
)


def small(**changes: Any) -> ModelSpec:
    """Build a spec of three model layers, the last two of them MoE layers."""
    fields = {
        "name": "small",
        "family": "custom",
        "source": "test",
        "hidden_size": 64,
        "n_hidden_layers": 3,
        "moe_layers": (1, 2),
        "n_experts": 8,
        "top_k": 2,
        "expert_width": 32,
        "expert_format": ExpertFormat(bits=16),
        "dense_width": 128,
        "vocab_size": 100,
        "attention": GroupedQueryAttention(n_heads=4, n_kv_heads=2, head_dim=16, window=10),
    }
    return ModelSpec.model_validate({**fields, **changes})


def test_single_values_stand_for_every_layer() -> None:
    """One number means the same in every MoE layer and one attention block the same in every model layer."""
    spec = small()
    assert (spec.n_experts, spec.top_k, spec.expert_width, spec.routing) == ((8, 8), (2, 2), (32, 32), ("topk", "topk"))
    assert len(spec.attention) == 3
    assert spec.n_layers == 2


def test_expert_bytes_follow_the_formula_or_what_is_stated() -> None:
    """Expert bytes come from the format unless they are stated."""
    assert (small().expert_bytes, small().expert_bytes_source) == ((12_288, 12_288), "formula")
    stated = small(expert_bytes=(5, 6))
    assert (stated.expert_bytes, stated.expert_bytes_source) == ((5, 6), "stated")


def test_resident_bytes_by_hand() -> None:
    """Everything but routed experts is resident: attention, dense MLP, shared experts, routers, tables, norms."""
    spec = small(n_shared_experts=1, shared_width=16, weight_bits=8)
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64
    dense, shared, router, norms = 3 * 64 * 128, 3 * 64 * 16, 64 * 8, 7 * 64
    assert spec.attention_bytes(0) == attention
    assert (spec.dense_mlp_bytes, spec.n_dense_mlps(0), spec.n_dense_mlps(1)) == (dense, 1, 0)
    assert (spec.shared_expert_bytes, spec.router_bytes(0), spec.head_bytes) == (shared, 2 * router, 2 * 6_400)
    resident = 3 * attention + dense + 2 * shared + 2 * (2 * router) + 2 * (2 * 6_400 + norms)
    assert spec.resident_bytes == resident
    assert small(n_shared_experts=1, shared_width=16, weight_bits=8, tie_word_embeddings=True).resident_bytes == (
        resident - 2 * 6_400
    )


def test_sliding_window_bounds_the_cache() -> None:
    """A windowed layer reads and keeps no more than its window."""
    spec = small()
    assert (spec.attention_window(0), spec.kv_bytes_per_token(0)) == (10, 2 * 2 * 16 * 2)
    assert spec.kv_read_bytes(0, 4) == 4 * 128
    assert spec.kv_read_bytes(0, 1_000) == 10 * 128
    assert spec.kv_cache_bytes(1_000) == 3 * 10 * 128


def test_cache_bits_scale_the_cache() -> None:
    """An 8-bit cache is half a 16-bit one."""
    assert 2 * small(kv_bits=8).kv_read_bytes(0, 7) == small().kv_read_bytes(0, 7)


def test_grouped_query_parameters_by_hand() -> None:
    """Gates double the query part, a shared projection halves keys and values, biases add one per output."""
    shape = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 16}
    assert GroupedQueryAttention(**shape).n_parameters(64) == 64 * (64 + 64) + 64 * 64
    assert GroupedQueryAttention(**shape, has_output_gate=True).n_parameters(64) == 64 * (128 + 64) + 64 * 64
    assert GroupedQueryAttention(**shape, shares_kv_projection=True).n_parameters(64) == 64 * (64 + 32) + 64 * 64
    assert GroupedQueryAttention(**shape, has_bias=True).n_parameters(64) == 64 * (64 + 64) + 64 * 64 + 128


def test_latent_attention_by_hand() -> None:
    """The latent is what a token keeps; an indexer reads its own keys and only the chosen latents."""
    shape = {"n_heads": 4, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    common = 64 * 12 + 8 * 4 * 14 + 4 * 6 * 64
    plain = LatentAttention(**shape, q_lora_rank=16)
    assert plain.n_parameters(64) == 64 * 16 + 16 * 48 + common
    assert LatentAttention(**shape).n_parameters(64) == 64 * 48 + common
    assert (plain.kv_values_per_token, plain.kv_values_read(100)) == (12, 1_200)
    sparse = LatentAttention(**shape, q_lora_rank=16, index_n_heads=2, index_head_dim=5, index_topk=10)
    assert sparse.n_parameters(64) == plain.n_parameters(64) + 16 * 10 + 64 * 5 + 64 * 2
    assert (sparse.kv_values_per_token, sparse.kv_values_read(100), sparse.kv_values_kept(100)) == (17, 620, 1_700)


def test_compressed_attention_by_hand() -> None:
    """A step reads the window, the chosen compressed entries and all indexer keys."""
    shape = {"n_heads": 4, "head_dim": 16, "q_lora_rank": 8, "o_groups": 2, "o_lora_rank": 8, "window": 10}
    core = 64 * 8 + 8 * 64 + 64 * 16 + 64 * 8 + 2 * 8 * 64
    near = CompressedAttention(**shape)
    heavy = CompressedAttention(**shape, compress_ratio=128)
    sparse = CompressedAttention(**shape, compress_ratio=4, index_n_heads=2, index_head_dim=5, index_topk=20)
    assert near.n_parameters(64) == core
    assert heavy.n_parameters(64) == core + 2 * 64 * 16
    assert sparse.n_parameters(64) == core + 4 * 64 * 16 + 4 * 64 * 5 + 8 * 10 + 64 * 2
    assert [block.kv_values_read(1_000) for block in (near, heavy, sparse)] == [160, 160 + 7 * 16, 160 + 320 + 1_250]
    assert [block.kv_values_kept(1_000) for block in (near, heavy, sparse)] == [160, 160 + 7 * 16, 160 + 250 * 21]
    assert sparse.kv_values_per_token == 16


def test_fixed_states_do_not_grow() -> None:
    """Linear attention and state space layers read the same state after any context."""
    linear = LinearAttention(n_key_heads=2, n_value_heads=4, key_head_dim=8, value_head_dim=8, conv_width=4)
    mamba = MambaMixer(inner_size=128, state_size=16, conv_width=4, dt_rank=4)
    assert linear.n_parameters(64) == 64 * (2 * 16 + 2 * 32 + 2 * 4) + 4 * 64 + 32 * 64
    assert mamba.n_parameters(64) == 128 * (3 * 64 + 4 + 2 * 4 + 3 * 16)
    for block, n_values in ((linear, 256), (mamba, 2_048)):
        assert {block.kv_values_read(n) for n in (0, 1, 10_000)} == {n_values}
        assert block.kv_values_kept(5) == n_values
        assert (block.kv_values_per_token, block.window) == (0, None)


def test_negative_context_is_refused() -> None:
    """A context below zero is an error, not negative bytes."""
    with pytest.raises(ConfigError, match="n_context_tokens is -1"):
        small().kv_read_bytes(0, -1)


def test_unknown_attention_is_an_error() -> None:
    """A spec without attention answers questions about it with an error, not with zero."""
    with pytest.raises(ConfigError, match="attention is not given"):
        small(attention=()).attention_bytes(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_layers": (2, 1)}, "ascending"),
        ({"moe_layers": (1, 1)}, "ascending"),
        ({"moe_layers": (1, 3)}, "allowed: 0 to 2"),
        ({"moe_layers": ()}, "at least 1 item"),
        ({"n_experts": (8,)}, "n_experts has 1 entries, allowed: 2"),
        ({"top_k": (2, 0)}, "top_k holds 0"),
        ({"top_k": 9}, "at most the 8 experts"),
        ({"expert_bytes": (1, 2, 3)}, "expert_bytes has 3"),
        ({"routing": ("topk", "table")}, "'topk' or 'hash'"),
        ({"dense_width": 0}, "dense_width is 0"),
        ({"expert_width": ("wide", 32)}, "valid integer"),
        ({"attention": (GroupedQueryAttention(n_heads=1, n_kv_heads=1, head_dim=1),) * 2}, "attention has 2"),
        ({"surprise": 1}, "Extra inputs"),
    ],
)
def test_inconsistent_specs_are_refused(changes: dict[str, Any], message: str) -> None:
    """Layers that do not fit together are refused."""
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_identity_experts_widen_the_fan_out() -> None:
    """A fan-out above the real experts is legal where identity experts fill it."""
    assert small(top_k=9, n_identity_experts=4).top_k == (9, 9)


def test_overrides_are_noted() -> None:
    """An override replaces the value, marks it as stated and leaves a note; the original stays."""
    spec = small()
    changed = spec.with_overrides(top_k=1, expert_bytes=[100, 200])
    assert (changed.top_k, changed.expert_bytes, changed.expert_bytes_source) == ((1, 1), (100, 200), "stated")
    assert changed.notes == ("top_k overridden: 1", "expert_bytes overridden: (100, 200)")
    assert (spec.top_k, spec.expert_bytes_source) == ((2, 2), "formula")
    assert spec.with_overrides() is spec
    assert spec.with_overrides(top_k=3).expert_bytes_source == "formula"


@pytest.mark.parametrize("override", [{"top_k": 9}, {"top_k": 0}, {"expert_bytes": [1]}, {"expert_bytes": 0}])
def test_bad_overrides(override: dict[str, Any]) -> None:
    """An override that does not fit the model is refused by name."""
    with pytest.raises(ConfigError, match="override of model 'small'"):
        small().with_overrides(**override)


def test_specs_are_frozen() -> None:
    """A spec cannot be changed in place."""
    with pytest.raises(ValueError, match="frozen"):
        small().hidden_size = 1  # type: ignore[misc]


def test_spec_survives_json() -> None:
    """A spec written as JSON reads back equal, attention kinds included."""
    for name in ("deepseek-v4-flash", "gpt-oss-20b", "glm-5"):
        spec = load_model(name)
        assert ModelSpec.model_validate(json.loads(spec.model_dump_json())) == spec


def test_unknown_model_suggests_the_nearest() -> None:
    """A misspelt catalog name suggests the nearest one."""
    with pytest.raises(UnknownNameError, match="did you mean 'deepseek-v4-flash'"):
        load_model("DeepSeek-V4-Flsh")


def test_catalog_name_wins_over_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that happens to have a catalog name does not shadow the catalog."""
    (tmp_path / "tiny-moe").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_model("tiny-moe").n_layers == 8


def test_folder_without_config(tmp_path: Path) -> None:
    """A folder without a config is refused."""
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load_model(str(tmp_path))


CONFIG_TOML = """
name = "mine"
source = "my lab"
assumed = ["scale layout"]
[config]
model_type = "mixtral"
hidden_size = 64
num_attention_heads = 4
vocab_size = 100
num_hidden_layers = 2
num_local_experts = 4
num_experts_per_tok = 2
intermediate_size = 128
[experts]
bits = 4
group_size = 32
scale_bits = 8
[overrides]
kv_bits = 8
"""
SPEC_TOML = """
name = "mine"
source = "my lab"
[spec]
hidden_size = 64
n_hidden_layers = 2
moe_layers = [1]
n_experts = 4
top_k = 2
expert_width = 32
dense_width = 128
vocab_size = 100
expert_bytes = 1000
expert_format = { bits = 4 }
attention = { kind = "gqa", n_heads = 4, n_kv_heads = 2, head_dim = 16 }
"""


def write(folder: Path, text: str) -> str:
    """Write a TOML file and give its path."""
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


def test_toml_with_config_keys(tmp_path: Path) -> None:
    """A TOML file may hold published config keys, with the experts' storage and other fields on top."""
    spec = load_model(write(tmp_path, CONFIG_TOML))
    assert (spec.name, spec.family, spec.source, spec.kv_bits) == ("mine", "mixtral", "my lab", 8)
    assert spec.expert_bytes == (3 * 64 * 128 * 17 // 32,) * 2
    assert spec.notes == ("assumed: scale layout",)


def test_toml_with_spec_fields(tmp_path: Path) -> None:
    """A TOML file may hold the spec's own fields, for families without a reader."""
    spec = load_model(write(tmp_path, SPEC_TOML))
    assert (spec.name, spec.family, spec.expert_bytes, spec.expert_bytes_source) == (
        "mine",
        "custom",
        (1000,),
        "stated",
    )
    assert spec.attention_bytes(1) == 2 * (64 * 128 + 64 * 64)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CONFIG_TOML + "[spec]\n", "either a \\[config\\] or a \\[spec\\]"),
        ('name = "x"\nsource = "y"\n', "either a \\[config\\] or a \\[spec\\]"),
        (CONFIG_TOML.replace('source = "my lab"', ""), "needs the texts name and source"),
        ("sorce = 1\n" + CONFIG_TOML, "unknown key 'sorce': did you mean 'source'"),
        (SPEC_TOML.replace("top_k", "topk"), "top_k: is missing"),
        (SPEC_TOML.replace("hidden_size", "hiden_size"), "hiden_size: is unknown, did you mean 'hidden_size'"),
        (CONFIG_TOML.replace("scale_bits = 8", "scale_bits = 99"), "scale_bits: .*less than or equal to 32.*99"),
        (CONFIG_TOML.replace("kv_bits", "kv_bit"), "kv_bit: is unknown, did you mean 'kv_bits'"),
    ],
)
def test_bad_model_files(tmp_path: Path, text: str, message: str) -> None:
    """A wrong model file is refused with the file, the field and what is allowed."""
    with pytest.raises(ConfigError, match=f"(?s)mine.toml: .*({message})"):
        load_model(write(tmp_path, text))
