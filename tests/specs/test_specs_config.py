"""Reading published configs: names, layer rules, per-layer lists, refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesim.errors import ConfigError, UnknownNameError
from moesim.specs import FAMILIES, CompressedAttention, ModelSpec, load_model, spec_from_config

GQA = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
MLA = {
    "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "q_lora_rank": 16, "kv_lora_rank": 8,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
V4 = {
    "hidden_size": 4096, "num_attention_heads": 64, "head_dim": 512, "vocab_size": 129280, "q_lora_rank": 1024,
    "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128, "index_n_heads": 64, "index_head_dim": 128,
    "index_topk": 512,
}  # fmt: skip
LONGCAT = {
    **MLA, "model_type": "longcat_flash", "hidden_size": 6144, "num_layers": 28, "num_hidden_layers": 56,
    "n_routed_experts": 512, "zero_expert_num": 256, "moe_topk": 12, "expert_ffn_hidden_size": 2048,
    "ffn_hidden_size": 12288,
}  # fmt: skip


def read(config: dict[str, Any]) -> ModelSpec:
    """Build a spec from config keys alone."""
    return spec_from_config(config, file="config.json", name="m", source="test")


def qwen2_moe(**changes: Any) -> dict[str, Any]:
    """Qwen1.5-MoE's routing keys on a small body."""
    config = {
        **GQA, "model_type": "qwen2_moe", "num_hidden_layers": 4, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "intermediate_size": 5632,
    }  # fmt: skip
    return {**config, **changes}


def deepseek_v3(**changes: Any) -> dict[str, Any]:
    """Build a small DeepSeek-V3."""
    config = {
        **MLA, "model_type": "deepseek_v3", "num_hidden_layers": 4, "n_routed_experts": 16, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "intermediate_size": 128, "n_shared_experts": 2, "first_k_dense_replace": 1,
    }  # fmt: skip
    return {**config, **changes}


def deepseek_v4(**changes: Any) -> dict[str, Any]:
    """DeepSeek-V4-Flash with few layers."""
    config = {
        **V4, "model_type": "deepseek_v4", "num_hidden_layers": 5, "n_routed_experts": 256, "num_experts_per_tok": 6,
        "moe_intermediate_size": 2048, "n_shared_experts": 1,
    }  # fmt: skip
    return {**config, **changes}


def ernie(**changes: Any) -> dict[str, Any]:
    """Ernie 4.5's routing keys on a small body."""
    config = {
        **GQA, "model_type": "ernie4_5_moe", "num_hidden_layers": 8, "moe_num_experts": 64, "moe_k": 6,
        "moe_intermediate_size": 1536, "moe_num_shared_experts": 2, "intermediate_size": 12288,
    }  # fmt: skip
    return {**config, **changes}


def gemma4(**changes: Any) -> dict[str, Any]:
    """Gemma-4 as published: the language model is nested."""
    text = {
        **GQA, "model_type": "gemma4_text", "num_hidden_layers": 6, "enable_moe_block": True, "num_experts": 128,
        "top_k_experts": 8, "moe_intermediate_size": 704, "intermediate_size": 2112, "head_dim": 16,
        "global_head_dim": 32, "sliding_window": 1024,
    }  # fmt: skip
    return {"model_type": "gemma4", "text_config": {**text, **changes}, "vision_config": {"hidden_size": 7}}


def flat(model_type: str, **changes: Any) -> dict[str, Any]:
    """Build a family with Mixtral's spelling."""
    config = {
        **GQA, "model_type": model_type, "num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
        "intermediate_size": 14336,
    }  # fmt: skip
    return {**config, **changes}


QWEN3_NEXT = qwen2_moe(
    model_type="qwen3_next", num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512,
    shared_expert_intermediate_size=512, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=8,
)  # fmt: skip
GLM4 = {**deepseek_v3(model_type="glm4_moe", n_routed_experts=128, num_experts_per_tok=8), **GQA}
LLAMA4 = {
    "model_type": "llama4",
    "text_config": flat(
        "llama4_text", num_local_experts=16, num_experts_per_tok=1, intermediate_size=8192, intermediate_size_mlp=16384,
        interleave_moe_layer_step=2, attention_chunk_size=8192,
    ),
}  # fmt: skip
HUNYUAN = {
    **GQA, "model_type": "hunyuan_v1_moe", "num_hidden_layers": 3, "num_experts": [8, 16, 4], "moe_topk": [2, 2, 1],
    "moe_intermediate_size": [32, 32, 32], "intermediate_size": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "n_experts", "top_k", "width", "shared"),
    [
        (flat("mixtral"), 8, 2, 14336, (0, 0)),
        (qwen2_moe(), 60, 4, 1408, (1, 5632)),
        (deepseek_v4(), 256, 6, 2048, (1, 2048)),
        (ernie(), 64, 6, 1536, (2, 3072)),
        (gemma4(), 128, 8, 704, (0, 0)),
        (LONGCAT, 512, 12, 2048, (0, 0)),
        (deepseek_v3(), 16, 2, 32, (2, 64)),
        (deepseek_v3(model_type="deepseek_v2", q_lora_rank=None), 16, 2, 32, (2, 64)),
        (deepseek_v3(model_type="glm_moe_dsa", index_topk=8, index_n_heads=2, index_head_dim=4), 16, 2, 32, (2, 64)),
        (GLM4, 128, 8, 32, (2, 64)),
        (qwen2_moe(model_type="qwen3_moe", shared_expert_intermediate_size=None), 60, 4, 1408, (0, 0)),
        (QWEN3_NEXT, 512, 10, 512, (1, 512)),
        (flat("olmoe", num_local_experts=None, num_experts=64, num_experts_per_tok=8), 64, 8, 14336, (0, 0)),
        (flat("gpt_oss", sliding_window=128, head_dim=16), 8, 2, 14336, (0, 0)),
        (flat("minimax_m2", num_local_experts=256), 256, 2, 14336, (0, 0)),
        (flat("granitemoe"), 8, 2, 14336, (0, 0)),
        (flat("granitemoeshared", shared_intermediate_size=96), 8, 2, 14336, (1, 96)),
        (flat("phimoe", num_local_experts=16), 16, 2, 14336, (0, 0)),
        (LLAMA4, 16, 1, 8192, (1, 8192)),
        (flat("jamba", num_local_experts=None, num_experts=16), 16, 2, 14336, (0, 0)),
        (HUNYUAN, 8, 2, 32, (1, 32)),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_c17_names(config: dict[str, Any], n_experts: int, top_k: int, width: int, shared: tuple[int, int]) -> None:
    """Every family's own spelling gives its expert count, fan-out, expert width and shared experts."""
    spec = read(config)
    assert (spec.n_experts[0], spec.top_k[0], spec.expert_width[0]) == (n_experts, top_k, width)
    assert (spec.n_shared_experts, spec.shared_width) == shared


@pytest.mark.parametrize(
    "changes",
    [{"enable_moe_block": False}, {"enable_moe_block": None}, {"num_experts": None}, {"moe_intermediate_size": None}],
)
def test_c17_names_gemma4_without_moe_block(changes: dict[str, Any]) -> None:
    """Gemma-4 is dense unless its flag is on and its expert fields are filled."""
    with pytest.raises(ConfigError, match="dense model"):
        read(gemma4(**changes))


def test_c17_names_dense_is_refused_before_weights(tmp_path: Path) -> None:
    """A dense config is refused although the checkpoint beside it cannot even be opened."""
    (tmp_path / "config.json").write_text(json.dumps({**GQA, "model_type": "llama", "num_hidden_layers": 2}))
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(ConfigError, match="dense model"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("count", [0, 1, None])
def test_c17_names_single_expert_is_dense(count: int | None) -> None:
    """An MoE family without at least two experts is a dense model."""
    with pytest.raises(ConfigError, match="dense model"):
        read(flat("mixtral", num_local_experts=count))


def test_c17_names_no_moe_layer_is_dense() -> None:
    """A layer rule that leaves no MoE layer makes a dense model."""
    with pytest.raises(ConfigError, match="dense model"):
        read(qwen2_moe(mlp_only_layers=[0, 1, 2, 3]))


def test_c17_names_unknown_family() -> None:
    """An unknown family is an error that suggests the nearest one and offers a way out."""
    with pytest.raises(UnknownNameError, match=r"'mixtrall': did you mean 'mixtral'.*\[spec\] table"):
        read(flat("mixtrall"))


def test_c17_names_missing_key_is_named_with_the_file() -> None:
    """A missing key is named, with all its spellings, the family and the file."""
    config = flat("mixtral")
    del config["num_experts_per_tok"]
    with pytest.raises(ConfigError, match=r"config\.json \(mixtral\): key num_experts_per_tok is missing"):
        read(config)


def test_c17_names_model_type_is_needed() -> None:
    """A config without a family is refused."""
    with pytest.raises(ConfigError, match="model_type is missing"):
        read(GQA)


@pytest.mark.parametrize("value", ["8", 2.5, True, -1])
def test_c17_names_wrong_value(value: object) -> None:
    """A value that is no count is refused with its key."""
    with pytest.raises(ConfigError, match="num_experts_per_tok is"):
        read(flat("mixtral", num_experts_per_tok=value))


def test_c17_names_nested_text_config_keeps_outer_quantization() -> None:
    """Quantisation stated beside a nested text config still counts."""
    config = gemma4()
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    assert read(config).expert_format.bits == 4


@pytest.mark.parametrize(
    ("config", "moe_layers"),
    [
        (qwen2_moe(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]), (1, 5)),
        (deepseek_v3(), (1, 2, 3)),
        (deepseek_v3(first_k_dense_replace=None), (3,)),
        (deepseek_v3(num_hidden_layers=6, moe_layer_freq=2), (2, 4)),
        (deepseek_v3(mlp_layer_types=["dense", "sparse", "dense", "sparse"]), (1, 3)),
        (ernie(moe_layer_start_index=2, moe_layer_interval=2), (3, 5, 7)),
        (ernie(moe_layer_start_index=1, moe_layer_end_index=3), (1, 2, 3)),
        (LLAMA4, (1, 3)),
        (flat("llama4", moe_layers=[0, 3], intermediate_size_mlp=9), (0, 3)),
        (flat("jamba", num_experts=16, num_hidden_layers=6, expert_layer_period=3, expert_layer_offset=1), (1, 4)),
        ({**HUNYUAN, "moe_layer_num_skipped": 1}, (1, 2)),
        (gemma4(), (0, 1, 2, 3, 4, 5)),
        (deepseek_v4(), (0, 1, 2, 3, 4)),
    ],
)
def test_c18_which_layers(config: dict[str, Any], moe_layers: tuple[int, ...]) -> None:
    """The reference implementation's rule decides which layers are MoE layers."""
    assert read(config).moe_layers == moe_layers


@pytest.mark.parametrize(
    ("changes", "routing"),
    [
        ({}, ("hash", "hash", "hash", "topk", "topk")),
        ({"num_hash_layers": 1}, ("hash", "topk", "topk", "topk", "topk")),
        ({"mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe", "moe"]}, ("hash", "topk", "hash", "topk", "topk")),
    ],
)
def test_c18_which_layers_are_hash_routed(changes: dict[str, Any], routing: tuple[str, ...]) -> None:
    """DeepSeek-V4's first layers pick experts by token id: three unless the config says otherwise."""
    assert read(deepseek_v4(**changes)).routing == routing


@pytest.mark.parametrize(
    ("changes", "ratios"),
    [
        ({"compress_ratios": [0, 0, 4, 128, 4, 0, 0]}, [0, 0, 4, 128, 4]),
        ({"layer_types": [*["sliding_attention"] * 4, "heavily_compressed_attention"]}, [0, 0, 0, 0, 128]),
        ({}, [128, 128, 128, 4, 128]),
    ],
)
def test_compression_by_layer(changes: dict[str, Any], ratios: list[int]) -> None:
    """DeepSeek-V4's compression follows its lists; entries beyond the model belong to prediction modules."""
    blocks = read(deepseek_v4(**changes)).attention
    assert [block.compress_ratio for block in blocks if isinstance(block, CompressedAttention)] == ratios


def test_compression_list_too_short() -> None:
    """A ratio list that does not reach the last layer is refused."""
    with pytest.raises(ConfigError, match="compress_ratios lists 2 layers, needed: 5"):
        read(deepseek_v4(compress_ratios=[0, 4]))


def test_linear_attention_by_layer() -> None:
    """Qwen3-Next has full attention on every fourth layer, Jamba on one layer of its period."""
    assert [block.kind for block in read(QWEN3_NEXT).attention] == ["linear", "linear", "linear", "gqa"]
    jamba = read(flat("jamba", num_experts=16, attn_layer_period=3, attn_layer_offset=1))
    assert [block.kind for block in jamba.attention] == ["mamba", "gqa", "mamba", "mamba"]


def test_c18_which_layers_bad_kind() -> None:
    """A layer kind that no rule knows is refused."""
    with pytest.raises(ConfigError, match="mlp_layer_types holds 'spars'"):
        read(deepseek_v3(mlp_layer_types=["dense", "spars", "sparse", "sparse"]))


def test_c19_identity_experts() -> None:
    """Identity experts have ids but no bytes, and MoE layers are the blocks, not the attentions."""
    spec = read(LONGCAT)
    assert (spec.n_layers, spec.n_experts[0], spec.n_identity_experts) == (28, 512, 256)
    assert spec.expert_bytes == (75_497_472,) * 28
    assert spec.layer_bytes(0) == 512 * 75_497_472
    row = [3, 700, 512, 511, 767, 0, 1, 2, 4, 5, 6, 7]
    real = [expert for expert in row if expert < spec.n_experts[0]]
    assert len(real) * spec.expert_bytes[0] == 679_477_248
    assert spec.router_parameters(0) == 6144 * 768


def test_c19_identity_experts_two_halves_per_layer() -> None:
    """A LongCat layer holds two attentions and two dense MLPs beside its experts."""
    spec = read(LONGCAT)
    single = read({**deepseek_v3(), "hidden_size": 6144})
    assert spec.attention_bytes(0) == 2 * single.attention_bytes(0)
    assert spec.kv_bytes_per_token(0) == 2 * single.kv_bytes_per_token(0)
    assert spec.n_dense_mlps(0) == 2
    assert spec.dense_mlp_bytes == 3 * 6144 * 12288 * 2


def test_c19_identity_experts_without_num_layers() -> None:
    """Where only the doubled count is given it is halved."""
    assert read({**LONGCAT, "num_layers": None}).n_layers == 28


def test_c20_per_layer_lists() -> None:
    """Expert count and fan-out may differ from layer to layer."""
    spec = read(HUNYUAN)
    assert (spec.n_experts, spec.top_k) == ((8, 16, 4), (2, 2, 1))
    assert [n_experts > 12 for n_experts in spec.n_experts] == [False, True, False]
    assert [min(8, n_experts) // top_k for n_experts, top_k in zip(spec.n_experts, spec.top_k, strict=True)] == [
        4,
        4,
        4,
    ]
    assert sum(8 - min(8, n_experts) for n_experts in spec.n_experts) == 4
    assert (spec.max_n_experts, spec.max_top_k) == (16, 2)
    assert [spec.router_parameters(layer) for layer in range(3)] == [512, 1024, 256]


def test_c20_per_layer_lists_too_short() -> None:
    """A list that does not reach the last layer is refused with both lengths."""
    with pytest.raises(ConfigError, match="moe_topk lists 2 layers, needed: 3"):
        read({**HUNYUAN, "moe_topk": [2, 2]})


def test_c20_per_layer_lists_fan_out_above_experts() -> None:
    """A fan-out above a layer's experts is refused."""
    with pytest.raises(ConfigError, match="top_k is 5"):
        read({**HUNYUAN, "moe_topk": [2, 2, 5]})


def test_documented_families_have_a_reader() -> None:
    """The families named in the documentation all have a reader."""
    named = {
        "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v2", "deepseek_v3", "deepseek_v4",
        "glm4_moe", "glm_moe_dsa", "gpt_oss", "ernie4_5_moe", "hunyuan_v1_moe", "longcat_flash", "minimax_m2",
        "llama4", "jamba", "granitemoe", "phimoe", "gemma4",
    }  # fmt: skip
    assert named <= FAMILIES.keys()


def test_tied_embeddings_follow_the_family_unless_stated() -> None:
    """Gemma-4 and Ernie share embedding and head by default, Mixtral does not, and the config decides."""
    assert [read(config).tie_word_embeddings for config in (gemma4(), ernie(), flat("mixtral"))] == [True, True, False]
    assert not read(ernie(tie_word_embeddings=False)).tie_word_embeddings


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not valid JSON"), ("[1]", "a JSON object"), ("{}", "model_type is missing")],
)
def test_config_file_problems(tmp_path: Path, text: str, message: str) -> None:
    """A damaged config is refused by name."""
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"config.json.*{message}"):
        load_model(str(path))


def test_config_file_names_the_model_after_its_folder(tmp_path: Path) -> None:
    """A checkpoint's name is its folder's and its source is the path that was given."""
    folder = tmp_path / "My-Model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(flat("mixtral")))
    spec = load_model(str(folder))
    assert (spec.name, spec.family, spec.source) == ("My-Model", "mixtral", str(folder / "config.json"))


@pytest.mark.parametrize("make", [lambda: load_model("nowhere/config.json"), lambda: load_model("missing.toml")])
def test_missing_paths(make: Callable[[], ModelSpec]) -> None:
    """A path that does not exist is a missing file, not an unknown name."""
    with pytest.raises(ConfigError, match="no such file"):
        make()
