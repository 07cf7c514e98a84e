"""Score rules and lookahead chains by hand."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from profiler.record.prompts import Request
from profiler.record.rows import best_first
from profiler.routers.scores import ScoreRule, find_rule
from tests.profiler.recording_helpers import PROMPTS, record_batches, recorder_for, requests_of
from tests.profiler.tiny_families import tiny_model

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("softmax", [0.6439, 0.2369, 0.0871, 0.0321]),
        ("sigmoid", [0.8808, 0.7311, 0.5000, 0.2689]),
        ("sqrtsoftplus", [1.4584, 1.1460, 0.8326, 0.5597]),
        ("logit", [2.0, 1.0, 0.0, -1.0]),
    ],
)
def test_c16_scores_of_each_kind(kind: str, wanted: list[float]) -> None:
    """Logits 2, 1, 0, -1 give the values worked out by hand."""
    rule = ScoreRule(kind, kind, 0, None, "", 0, 4)
    np.testing.assert_allclose(rule.scores((LOGITS,))[0].numpy(), wanted, atol=5e-5)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "sqrtsoftplus", "logit"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_rule_is_found_from_the_values_of_a_top_k(kind: str, has_bias: bool) -> None:
    """The rule found reproduces what the top-k was taken on; masked groups are not held against it."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 8, generator=generator)
    block, experts = torch.nn.Module(), torch.nn.Module()
    block.register_buffer("selection_bias", torch.randn(8, generator=generator))
    true = ScoreRule(kind, kind, 0, block.selection_bias if has_bias else None, "", 0, 8)
    watched = true.scores((logits,)).clone()
    watched[:, 6:] = float("-inf")
    found = find_rule((logits, torch.zeros(6, 2)), watched, block, experts)
    assert found is not None
    assert (found.kind, found.bias_name) == (kind, "selection_bias" if has_bias else "")
    assert torch.equal(found.scores((logits,)), true.scores((logits,)))


def test_rule_that_explains_nothing_is_not_found() -> None:
    """Values that no known function gives are not taken for the nearest one."""
    logits = torch.linspace(-1, 1, 24).reshape(3, 8)
    assert find_rule((logits,), torch.tanh(logits), torch.nn.Module(), torch.nn.Module()) is None


def test_selections_are_best_first() -> None:
    """Ids follow falling scores, equal ones in the router's order, missing ones last; weights go along."""
    ids = np.array([[[3, 0, -1, 1]]], np.int16)
    weights = np.array([[[0.3, 0.1, 0.0, 0.2]]], np.float32)
    scores = np.array([[[0.5, 0.25, 0.0, 0.25]]], np.float16)
    ordered, moved = best_first(ids, weights, scores)
    assert ordered.tolist() == [[[0, 3, 1, -1]]]
    np.testing.assert_allclose(moved[0, 0], [0.1, 0.3, 0.2, 0.0], rtol=1e-6)


def test_lookahead_is_the_next_router_on_this_residual(tmp_path: Path) -> None:
    """What is recorded equals the formula: next norm on this residual after attention, times the next router."""
    model = tiny_model("mixtral")
    recorder, residuals = recorder_for(model), []
    layers = model.model.layers
    handle = layers[1].post_attention_layernorm.register_forward_pre_hook(lambda _, args: residuals.append(args[0]))
    recorded = requests_of(record_batches(recorder, tmp_path / "trace", [Request(0, PROMPTS[0], 3)]))[0]
    handle.remove()
    with torch.inference_mode():
        states = torch.cat([state.reshape(-1, 64) for state in residuals])
        norm = layers[2].post_attention_layernorm
        normed = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight
        wanted = torch.softmax(normed @ layers[2].mlp.gate.weight.T, dim=-1)
    np.testing.assert_allclose(recorded.lookahead[:, 2], wanted.numpy(), rtol=2e-3)
    assert np.isnan(recorded.lookahead[:, 0]).all()


def test_hash_layers_have_no_lookahead(tmp_path: Path) -> None:
    """Layers routed by a table of token ids are named so and have scores but no prediction: the token tells."""
    model = tiny_model("deepseek_v4")
    reader = record_batches(recorder_for(model, "deepseek_v4"), tmp_path / "trace", [Request(0, PROMPTS[0], 3)])
    recorded = requests_of(reader)[0]
    assert reader.meta.model.routing == ("hash", "hash", "topk", "topk")
    assert np.isnan(recorded.lookahead[:, :2]).all()
    assert np.isfinite(recorded.lookahead[:, 2:].astype(np.float32)).all()
    table = model.model.layers[0].mlp.gate.tid2eid.numpy()[recorded.token_id]
    assert np.array_equal(np.sort(recorded.topk_ids[:, 0], axis=1), np.sort(table, axis=1))


def test_identity_experts_have_ids_but_no_columns(tmp_path: Path) -> None:
    """LongCat's identity experts are ids past the experts with weights; scores hold those with weights."""
    reader = record_batches(
        recorder_for(tiny_model("longcat_flash"), "longcat_flash"), tmp_path / "trace", [Request(0, PROMPTS[0], 8)]
    )
    recorded = requests_of(reader)[0]
    assert (reader.meta.model.n_experts[0], reader.meta.model.n_identity_experts) == (8, 4)
    assert recorded.scores.shape[2] == 8
    assert recorded.topk_ids.max() >= 8
