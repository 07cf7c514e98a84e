"""Bytes of one expert: formula, quantisation claims, tensors on disk."""

import json
from pathlib import Path
from typing import Any

import pytest

from moesim.errors import ConfigError
from moesim.specs import ExpertFormat, ModelSpec, load_model, spec_from_config
from moesim.specs.safetensors import TensorInfo, read_header

BODY = {
    "model_type": "mixtral", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "num_hidden_layers": 2,
    "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128,
}  # fmt: skip
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1, "I32": 4}


def write_header(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """Write the header of a safetensors file and none of its data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        n_bytes = ITEM_BYTES[dtype]
        for size in shape:
            n_bytes *= size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + n_bytes]}
        offset += n_bytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def per_expert(dtype: str = "BF16", layers: int = 2, experts: int = 4) -> dict[str, tuple[str, list[int]]]:
    """Mixtral's own naming: three matrices per expert, beside a router and a norm."""
    tensors: dict[str, tuple[str, list[int]]] = {"model.norm.weight": ("BF16", [64])}
    for layer in range(layers):
        prefix = f"model.layers.{layer}.block_sparse_moe"
        tensors[f"{prefix}.gate.weight"] = ("BF16", [experts, 64])
        for expert in range(experts):
            tensors[f"{prefix}.experts.{expert}.w1.weight"] = (dtype, [128, 64])
            tensors[f"{prefix}.experts.{expert}.w2.weight"] = (dtype, [64, 128])
            tensors[f"{prefix}.experts.{expert}.w3.weight"] = (dtype, [128, 64])
    return tensors


def checkpoint(folder: Path, tensors: dict[str, tuple[str, list[int]]], **changes: Any) -> Path:
    """Write a folder with a config and one safetensors header."""
    (folder / "config.json").write_text(json.dumps({**BODY, **changes}))
    write_header(folder / "model.safetensors", tensors)
    return folder


def claim(quantization: dict[str, Any], **changes: Any) -> ModelSpec:
    """Build a spec from a quantisation claim alone."""
    config = {**BODY, "hidden_size": 4096, "intermediate_size": 2048, "quantization_config": quantization, **changes}
    return spec_from_config(config, file="config.json", name="m", source="test")


@pytest.mark.parametrize(
    ("stored", "hidden_size", "width", "n_bytes"),
    [
        (ExpertFormat(bits=16), 4096, 2048, 50_331_648),
        (ExpertFormat(bits=4), 4096, 2048, 12_582_912),
        (ExpertFormat(bits=4, group_size=32, scale_bits=8), 4096, 2048, 13_369_344),
        (ExpertFormat(bits=4, group_size=128, scale_bits=16), 4096, 2048, 12_976_128),
        (ExpertFormat(bits=4), 6144, 2048, 18_874_368),
        (ExpertFormat(bits=4, group_size=32, scale_bits=8), 2880, 2880, 13_219_200),
        (ExpertFormat(bits=4, group_size=32, scale_bits=8, has_bias=True), 2880, 2880, 13_236_480),
        (ExpertFormat(bits=16), 4096, 14336, 352_321_536),
        (ExpertFormat(bits=16), 6144, 2048, 75_497_472),
        (ExpertFormat(bits=16, has_gate=False), 4096, 2048, 33_554_432),
        (ExpertFormat(bits=8, group_size=128, group_rows=128, scale_bits=32), 7168, 2048, 44_040_192 + 3 * 896 * 4),
        (ExpertFormat(bits=8, scale_bits=32), 64, 128, 3 * 8192 + (128 + 128 + 64) * 4),
        (ExpertFormat(bits=4, group_size=64, scale_bits=16, zero_point_bits=4), 64, 128, 12_288 + 3 * 128 * 5 // 2),
    ],
)
def test_c21_quantised_bytes(stored: ExpertFormat, hidden_size: int, width: int, n_bytes: int) -> None:
    """The formula counts scales, zero points and biases, not weights alone."""
    assert stored.expert_bytes(hidden_size, width) == n_bytes


def test_c21_quantised_bytes_partial_groups() -> None:
    """A row that does not fill its last group still has a scale for it."""
    stored = ExpertFormat(bits=8, group_size=32, scale_bits=8)
    assert stored.expert_bytes(40, 2) == 3 * 80 + 2 * 2 * 2 + 40 * 1


@pytest.mark.parametrize(
    ("name", "layer_bytes", "n_parameters"),
    [
        ("deepseek-v4-flash", 3_422_552_064, 25_165_824),
        ("gpt-oss-120b", 128 * 13_236_480, 24_883_200 + 8_640),
        ("mixtral-8x7b", 8 * 352_321_536, 176_160_768),
        ("glm-5-w4a8c8", 256 * 18_874_368, 37_748_736),
    ],
)
def test_c21_quantised_bytes_reference_sizes(name: str, layer_bytes: int, n_parameters: int) -> None:
    """Catalog models have the hand-computed sizes of one layer and one expert."""
    spec = load_model(name)
    assert (spec.layer_bytes(0), spec.expert_parameters(0)) == (layer_bytes, n_parameters)


@pytest.mark.parametrize(
    ("quantization", "changes", "n_bytes", "weight_bits"),
    [
        ({"quant_method": "mxfp4"}, {}, 13_369_344, 16),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, {}, 12_976_128 + 98_304, 4),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, {}, 12_582_912 + 8192 * 2 + 4096, 4),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": False}, {}, 12_976_128, 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, {}, 12_582_912 + 393_216 * 4, 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, {}, 25_165_824 + 8192 * 4, 8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, {}, 25_165_824 + 1536 * 4, 8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, {"expert_dtype": "fp4"}, 13_369_344, 8),
        ({"bits": 4, "group_size": 64}, {}, 12_582_912 + 393_216 * 4, 4),
        ({"bits": 8, "group_size": 32, "mode": "mxfp4"}, {}, 13_369_344, 4),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128, "symmetric": True}}},
            },
            {},
            12_976_128,
            4,
        ),
    ],
)
def test_c21_quantised_bytes_claims(
    quantization: dict[str, Any], changes: dict[str, Any], n_bytes: int, weight_bits: int
) -> None:
    """Each quantisation method's own layout of scales and zero points is counted."""
    spec = claim(quantization, **changes)
    assert (spec.expert_bytes[0], spec.weight_bits) == (n_bytes, weight_bits)
    assert spec.expert_bytes_source == "formula"


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "magic"}, "'magic', known: awq, .* an \\[experts\\] table"),
        ({"quant_method": "gptq", "bits": 4}, "lacks a usable 'group_size'"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {}, "b": {}}}, "lacks a usable 'config_groups'"),
    ],
)
def test_c21_quantised_bytes_unknown_claims(quantization: dict[str, Any], message: str) -> None:
    """A claim that cannot be turned into bytes is refused, with the way out."""
    with pytest.raises(ConfigError, match=message):
        claim(quantization)


def test_c21_quantised_bytes_unknown_dtype() -> None:
    """A dtype without a known width is refused."""
    with pytest.raises(ConfigError, match="dtype is 'int2'"):
        claim({}, dtype="int2")


def test_c22_claimed_vs_actual_fused(tmp_path: Path) -> None:
    """Fused 16-bit experts overrule a 4-bit claim; one expert is the tensor divided by the expert count."""
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj": ("BF16", [256, 4096, 4096]),
        "model.layers.0.mlp.experts.down_proj": ("BF16", [256, 4096, 2048]),
    }
    folder = checkpoint(
        tmp_path,
        tensors,
        hidden_size=4096,
        intermediate_size=2048,
        num_hidden_layers=1,
        num_local_experts=256,
        quantization_config={"quant_method": "mxfp4"},
    )
    spec = load_model(str(folder))
    assert spec.expert_bytes == (50_331_648,)
    assert spec.expert_bytes_source == "safetensors"
    assert spec.expert_format.bits == 16
    assert spec.notes == (
        "the config claims 4-bit experts of 13369344 bytes, the tensors hold 50331648 bytes: tensors used",
    )
    assert spec.expert_bytes[0] / 13_369_344 == pytest.approx(3.765, abs=5e-4)


@pytest.mark.parametrize(
    "own",
    [
        {"model.layers.0.mlp.experts.up_proj": {"bits": 4, "group_size": 32}},
        {"model.layers.0.mlp.switch_mlp.up_proj": {"bits": 4, "group_size": 32}},
        {"model.layers.0.mlp.switch_glu.up_proj": {"bits": 4, "group_size": 32}},
    ],
)
def test_c22_claimed_vs_actual_own_setting(own: dict[str, Any]) -> None:
    """Experts with their own setting follow it, whatever the global one is."""
    spec = claim({"bits": 8, "group_size": 64, **own})
    assert spec.expert_bytes[0] == 12_582_912 + 786_432 * 4
    assert spec.weight_bits == 8


def test_c22_claimed_vs_actual_shared_setting_is_not_theirs() -> None:
    """A setting of shared experts says nothing about routed ones."""
    spec = claim({"bits": 8, "group_size": 64, "layers.0.mlp.shared_experts.up": {"bits": 4, "group_size": 32}})
    assert spec.expert_format.bits == 8


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignore"])
def test_c22_claimed_vs_actual_excluded_experts(key: str) -> None:
    """Experts on the quantiser's exclusion list keep the model's own type."""
    spec = claim({"quant_method": "gptq", "bits": 4, "group_size": 128, key: ["re:.*mlp.experts.*"]})
    assert spec.expert_bytes[0] == 50_331_648
    assert spec.weight_bits == 4


def test_c22_claimed_vs_actual_agreement_leaves_no_note(tmp_path: Path) -> None:
    """Tensors that match the claim are used without a remark."""
    spec = load_model(str(checkpoint(tmp_path, per_expert())))
    assert (spec.expert_bytes, spec.expert_bytes_source, spec.notes) == ((49_152, 49_152), "safetensors", ())


def test_c22_claimed_vs_actual_scales_and_biases_count(tmp_path: Path) -> None:
    """Everything stored for one expert is summed, whatever it is called."""
    tensors = per_expert("U8")
    for layer in range(2):
        for expert in range(4):
            tensors[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight_scale"] = ("F32", [128])
            tensors[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.bias"] = ("BF16", [64])
    spec = load_model(str(checkpoint(tmp_path, tensors)))
    assert spec.expert_bytes == (3 * 8192 + 512 + 128,) * 2
    assert spec.expert_format.bits == 16


def test_c22_claimed_vs_actual_width_is_that_of_weights(tmp_path: Path) -> None:
    """The bits of a corrected format are those of the weights, whatever type their scales have."""
    tensors = per_expert("F8_E4M3")
    for layer in range(2):
        for expert in range(4):
            tensors[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight_scale_inv"] = ("F32", [1, 1])
    spec = load_model(str(checkpoint(tmp_path, tensors)))
    assert (spec.expert_bytes[0], spec.expert_format.bits) == (3 * 8192 + 4, 8)


def test_c22_claimed_vs_actual_other_tensors_do_not_count(tmp_path: Path) -> None:
    """Shared experts, prediction modules and layers beyond the model are nobody's routed expert."""
    tensors = per_expert()
    tensors["model.layers.0.block_sparse_moe.shared_experts.w1.weight"] = ("BF16", [128, 64])
    tensors["mtp.layers.0.block_sparse_moe.experts.0.w1.weight"] = ("BF16", [128, 64])
    tensors["model.layers.2.block_sparse_moe.experts.0.w1.weight"] = ("BF16", [128, 64])
    assert load_model(str(checkpoint(tmp_path, tensors))).expert_bytes == (49_152, 49_152)


def test_c22_claimed_vs_actual_granite_fused_names(tmp_path: Path) -> None:
    """Granite's fused matrices are found although their names do not say experts."""
    tensors = {}
    for layer in range(2):
        tensors[f"model.layers.{layer}.block_sparse_moe.input_linear.weight"] = ("BF16", [4, 256, 64])
        tensors[f"model.layers.{layer}.block_sparse_moe.output_linear.weight"] = ("BF16", [4, 64, 128])
    assert load_model(str(checkpoint(tmp_path, tensors, model_type="granitemoe"))).expert_bytes == (49_152, 49_152)


def test_c22_claimed_vs_actual_shards_with_index(tmp_path: Path) -> None:
    """Only the index's files count, so a second copy of the weights beside them changes nothing."""
    tensors = per_expert()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        write_header(tmp_path / file, {name: tensors[name] for name in part})
    write_header(tmp_path / "consolidated.safetensors", tensors)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(BODY))
    assert load_model(str(tmp_path / "config.json")).expert_bytes == (49_152, 49_152)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"1 are missing, first b\.safetensors"):
        load_model(str(tmp_path))


def test_c22_claimed_vs_actual_two_copies_without_index(tmp_path: Path) -> None:
    """The same tensor in two files is refused, not counted twice."""
    folder = checkpoint(tmp_path, per_expert())
    write_header(folder / "second.safetensors", per_expert())
    with pytest.raises(ConfigError, match="is also in"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("layers.1.", "model layer 1 has no expert tensors"),
        ("layers.1.block_sparse_moe.experts.2.", r"layer 1 lacks experts \[2\] of 4"),
        ("layers.0.block_sparse_moe.experts.3.w3", "experts of model layer 0 have 32768 to 49152 bytes"),
    ],
)
def test_c22_claimed_vs_actual_incomplete(tmp_path: Path, drop: str, message: str) -> None:
    """A checkpoint that lacks experts or has uneven ones is refused."""
    kept = {name: tensor for name, tensor in per_expert().items() if drop not in name}
    with pytest.raises(ConfigError, match=message):
        load_model(str(checkpoint(tmp_path, kept)))


def test_header_is_read_and_nothing_else(tmp_path: Path) -> None:
    """A header gives type, shape and bytes although the data behind it is missing."""
    path = tmp_path / "x.safetensors"
    write_header(path, {"a": ("BF16", [2, 3]), "b": ("U8", [5])})
    assert read_header(path) == {"a": TensorInfo("BF16", (2, 3), 12), "b": TensorInfo("U8", (5,), 5)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no header length"),
        (b"\xff" * 8, "no header length"),
        ((100).to_bytes(8, "little") + b"{}", "header is cut: 2 of 100 bytes"),
        ((2).to_bytes(8, "little") + b"[]", "not a list of tensors"),
        ((10).to_bytes(8, "little") + b'{"a": {}} ', "not a list of tensors"),
        ((3).to_bytes(8, "little") + b"{a}", "not a list of tensors"),
    ],
)
def test_damaged_headers(tmp_path: Path, content: bytes, message: str) -> None:
    """A damaged file is refused by name."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"x\.safetensors.*{message}"):
        read_header(path)


def test_damaged_index(tmp_path: Path) -> None:
    """An index without its map is refused."""
    folder = checkpoint(tmp_path, per_expert())
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="no weight_map"):
        load_model(str(folder))
