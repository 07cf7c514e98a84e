"""Synthetic traces have the shapes of real ones, and statistics count rightly."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesim.errors import ConfigError
from moesim.trace import ModelShape, RequestTrace, TraceReader
from moesim.trace.ranking import top_experts
from moesim.trace.stats import (
    chance_overlap,
    coupling_recall,
    distinct_experts,
    expert_counts,
    gini,
    lag_overlap,
    lookahead_recall,
)
from moesim.trace.synth import SynthSettings, synthesize
from moesim.trace.validate import validate_trace
from tests.trace.trace_helpers import assert_same, rows_for, write_rows

SMALL = {"n_requests": 3, "prompt_tokens": (4, 8), "decode_tokens": (5, 9), "n_layers": 6}


def make(path: Path, **settings: Any) -> TraceReader:
    """Write a synthetic trace and open it."""
    synthesize(path, SynthSettings.of(**settings))
    return TraceReader(path)


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelShape, list[RequestTrace]]:
    """Make a trace of the default shapes, long enough for statistics."""
    path = tmp_path_factory.mktemp("synth") / "t.parquet"
    reader = make(path, n_requests=24, prompt_tokens=(16, 32), decode_tokens=(120, 160), seed=1)
    return reader.meta.model, list(reader.requests(["lookahead", "scores"]))


def test_lag_curve(default: tuple[ModelShape, list[RequestTrace]]) -> None:
    """Overlap jumps at lag 1 over a plateau that stays far above chance for 64 tokens."""
    shape, requests = default
    curve = lag_overlap(requests, shape, (1, 8, 16, 64)).mean(axis=0)
    chance = chance_overlap(expert_counts(requests, shape, "decode"), shape).mean()
    assert 0.38 < curve[0] < 0.48
    assert curve[0] - curve[1] > 0.08
    assert curve[1] - curve[3] < 0.02
    assert curve[3] > chance + 0.09


def test_layers_differ(default: tuple[ModelShape, list[RequestTrace]]) -> None:
    """Popularity hits its target on average and differs between layers, as does persistence."""
    shape, requests = default
    popularity = gini(expert_counts(requests, shape))
    assert popularity.mean() == pytest.approx(0.4, abs=0.04)
    assert popularity.min() < 0.33
    assert popularity.max() > 0.46
    near = lag_overlap(requests, shape, (1,))[:, 0]
    assert near.max() - near.min() > 0.12


def test_layers_are_coupled(default: tuple[ModelShape, list[RequestTrace]]) -> None:
    """A table of the previous layer's set predicts far better than popularity does."""
    shape, requests = default
    popularity = []
    for layer in range(1, shape.n_layers):
        counts = expert_counts(requests, shape)[layer]
        popularity.append(np.sort(counts)[-4:].sum() / counts.sum())
    assert np.nanmean(coupling_recall(requests, shape)) > np.mean(popularity) + 0.15


def test_lookahead_recall_hits_its_target(default: tuple[ModelShape, list[RequestTrace]]) -> None:
    """Lookahead finds the wanted share of the selected experts, the first layers fewer, layer 0 has none."""
    shape, requests = default
    recall = lookahead_recall(requests, shape)
    assert np.isnan(recall[0])
    np.testing.assert_allclose(recall[1:5], [0.5, 0.6, 0.7, 0.8], atol=0.04)
    assert recall[4:].mean() == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize(("target", "spread"), [(0.2, 0.03), (0.6, 0.1)])
def test_gini_target(tmp_path: Path, target: float, spread: float) -> None:
    """Other popularity targets are hit too."""
    settings = {"n_requests": 40, "prompt_tokens": (1, 1), "decode_tokens": (30, 40), "n_layers": 8, "n_experts": 64}
    reader = make(
        tmp_path / "t.parquet",
        gini=target,
        gini_spread=spread,
        domain_strength=0.2,
        request_strength=0.3,
        lookahead_recall=None,
        **settings,
    )
    assert gini(expert_counts(reader.requests(), reader.meta.model)).mean() == pytest.approx(target, abs=0.05)
    assert "lookahead" not in reader.columns


@pytest.mark.parametrize("score_kind", ["softmax", "sigmoid", "sqrtsoftplus", "logit"])
def test_c16_score_kinds(tmp_path: Path, score_kind: str) -> None:
    """Every kind of score is written with its name, and the recorded ids are its best, ties to the lowest id."""
    reader = make(tmp_path / "t.parquet", score_kind=score_kind, **SMALL)
    assert reader.meta.score_kind == score_kind
    for request in reader.requests(["scores", "topk_weights"]):
        assert request.scores is not None
        np.testing.assert_array_equal(request.topk_ids, top_experts(request.scores, 4))
        assert request.topk_weights is not None
        np.testing.assert_allclose(request.topk_weights.sum(axis=2), 1, atol=1e-5)
        if score_kind == "softmax":
            np.testing.assert_allclose(request.scores.astype(np.float32).sum(axis=2), 1, atol=0.01)


def test_hash_layers(tmp_path: Path) -> None:
    """In hash layers equal tokens select equal experts, and there is no lookahead."""
    reader = make(tmp_path / "t.parquet", n_hash_layers=2, vocab_size=5, **SMALL)
    assert reader.meta.model.routing == ("hash", "hash", "topk", "topk", "topk", "topk")
    of_token: dict[tuple[int, int], list[int]] = {}
    for request in reader.requests(["token_id", "lookahead"]):
        assert request.token_id is not None
        for token, ids in zip(request.token_id.tolist(), request.topk_ids, strict=True):
            for layer in range(2):
                assert of_token.setdefault((layer, token), ids[layer].tolist()) == ids[layer].tolist()
        assert request.lookahead is not None
        assert np.isnan(request.lookahead[:, :2]).all()
        assert not np.isnan(request.lookahead[:, 2:]).any()
    assert len(of_token) > 4


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    """Equal settings and seed give equal bytes, in another process and hash seed too; another seed does not."""
    program = (
        "from moesim.trace.synth import SynthSettings, synthesize; import sys;"
        f"synthesize(sys.argv[1], SynthSettings.of(**{SMALL!r}))"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "a.parquet")],
        check=True,
        env={"PYTHONHASHSEED": "77"},
        cwd=Path(__file__).parents[2],
    )
    synthesize(tmp_path / "b.parquet", SynthSettings.of(**SMALL))
    synthesize(tmp_path / "c.parquet", SynthSettings.of(**SMALL, seed=1))
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    assert (tmp_path / "a.parquet").read_bytes() != (tmp_path / "c.parquet").read_bytes()


def test_more_requests_leave_the_first_ones_alone(tmp_path: Path) -> None:
    """A request depends on its own number, not on how many others there are."""
    three = list(make(tmp_path / "a.parquet", **SMALL).requests(["scores", "lookahead"]))
    five = list(make(tmp_path / "b.parquet", **(SMALL | {"n_requests": 5})).requests(["scores", "lookahead"]))
    for left, right in zip(three, five[:3], strict=True):
        assert_same(left, right)


def test_synthetic_traces_are_valid(tmp_path: Path) -> None:
    """A synthetic trace passes the check without a suspicion."""
    make(tmp_path / "t.parquet", **SMALL)
    assert validate_trace(tmp_path / "t.parquet").findings == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"colour": "red"}, "colour"),
        ({"top_k": 32}, "top_k = 32 must be below n_experts = 32"),
        ({"decode_tokens": (9, 3)}, "decode_tokens = \\(9, 3\\)"),
        ({"gini": 0.01, "gini_spread": 0.0, "domain_strength": 2.0}, "gini: 0.01 is out of reach in layer 0"),
        ({"lookahead_recall": 0.05}, "lookahead_recall: 0.05 is out of reach"),
    ],
)
def test_settings_out_of_reach(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    """Unknown, illegal and unreachable settings are refused by name, and no file is left."""
    with pytest.raises(ConfigError, match=message):
        make(tmp_path / "t.parquet", **(SMALL | settings))
    assert list(tmp_path.iterdir()) == []


def test_c14_ties() -> None:
    """Equal scores rank by lowest id, also -0 against 0, and infinities by their value."""
    assert top_experts(np.full(4, 0.5, np.float16), 2).tolist() == [0, 1]
    assert top_experts(np.array([0.0, -0.0, 0.0], np.float16), 2).tolist() == [0, 1]
    assert top_experts(np.array([-1, -2, -0.5, -np.inf], np.float16), 4).tolist() == [2, 0, 1, 3]
    scores = np.random.default_rng(3).integers(-4, 4, (50, 40)).astype(np.float16)
    naive = [sorted(range(40), key=lambda expert: (-row[expert], expert))[:7] for row in scores.tolist()]
    assert top_experts(scores, 7).tolist() == naive


def test_c14_recorded_ids_win(tmp_path: Path) -> None:
    """Ids that differ from the scores' own ranking come back as recorded."""
    rows = rows_for([(0, 0, 0)], [[3, 1]], scores=np.full((1, 4), 0.5, np.float16))
    path = write_rows(tmp_path / "t.parquet", ModelShape.uniform("one", 1, 4, 2), rows)
    assert next(TraceReader(path).requests(["scores"])).topk_ids.tolist() == [[[3, 1]]]


def toy(ids: list[list[int]]) -> RequestTrace:
    """Make a decode-only request of one layer."""
    n_tokens = len(ids)
    return RequestTrace(
        request=0,
        domain=None,
        prompt_tokens=0,
        position=np.arange(n_tokens, dtype=np.int32),
        step=np.arange(1, n_tokens + 1, dtype=np.int32),
        is_decode=np.ones(n_tokens, np.bool_),
        topk_ids=np.array(ids, np.int16)[:, None],
    )


def test_statistics_by_hand() -> None:
    """Counts, Gini, overlap and distinct experts of a trace small enough to count by hand."""
    shape = ModelShape.uniform("one", 1, 4, 2)
    request = toy([[0, 1], [1, 2], [-1, -1], [1, 0]])
    assert expert_counts([request], shape).tolist() == [[2, 3, 1, 0]]
    assert expert_counts([request], shape, "prefill").sum() == 0
    assert gini(np.array([[1, 1, 1, 1], [0, 0, 0, 4]])).tolist() == [0, 0.75]
    assert lag_overlap([request], shape, (1, 3)).tolist() == [[1 / 4, 1.0]]
    assert distinct_experts(request, shape).tolist() == [3]
