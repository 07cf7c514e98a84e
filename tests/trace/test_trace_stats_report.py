"""`moesim trace stats`: numbers by hand on small traces, published figures on real ones, tables and pictures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from moesim.cli.trace import trace_app
from moesim.errors import ConfigError
from moesim.plots.trace_stats import draw_trace_stats
from moesim.trace import ModelShape, RequestTrace, TraceReader
from moesim.trace.routing_stats import GAP_EDGES, RoutingStats, collect_stats
from tests.trace.trace_helpers import make_request, write_requests

TRACES = Path(__file__).parents[2] / "traces"


def _request(
    ids: list[list[int]], number: int = 0, domain: str | None = "a", n_prompt: int = 0, **columns: Any
) -> RequestTrace:
    """Give a request of one layer with these selections."""
    n_tokens = len(ids)
    position = np.arange(n_tokens, dtype=np.int32)
    return RequestTrace(
        request=number,
        domain=domain,
        prompt_tokens=n_prompt,
        position=position,
        step=np.maximum(position - n_prompt + 1, 0).astype(np.int32),
        is_decode=position >= n_prompt,
        topk_ids=np.array(ids, np.int16)[:, None, :],
        **columns,
    )


def _stats(tmp_path: Path, requests: list[RequestTrace], n_experts: int = 4, **options: Any) -> RoutingStats:
    """Write requests of one layer, and collect."""
    top_k = requests[0].topk_ids.shape[2]
    path = write_requests(tmp_path / "t.parquet", ModelShape.uniform("toy", 1, n_experts, top_k), requests)
    return collect_stats(TraceReader(path), **options)


def test_popularity(tmp_path: Path) -> None:
    """Counts 4, 2, 1, 1: Gini 5/16, and the hottest of four carries a half; chance follows from the shares."""
    stats = _stats(tmp_path, [_request([[0, 1], [0, 1], [0, 2], [0, 3]])])
    assert stats.counts.tolist() == [[4, 2, 1, 1]]
    assert stats.gini[0] == pytest.approx(5 / 16)
    assert stats.hottest_quarter[0] == pytest.approx(0.5)
    assert stats.chance[0] == pytest.approx((1 + 0.25 + 2 / 16) / 2)


def test_overlap_by_lag(tmp_path: Path) -> None:
    """A period of two tokens overlaps by a half at lag 1 and wholly at lags 2, 4 and 8; lag 16 is unknown here."""
    stats = _stats(tmp_path, [_request([[0, 1], [1, 2]] * 6)])
    assert stats.overlap[0, :4].tolist() == [0.5, 1, 1, 1]
    assert np.isnan(stats.overlap[0, 4:]).all()


def test_windows_never_cross_requests(tmp_path: Path) -> None:
    """Different experts are counted in whole windows inside a request; the rest of a request is left out."""
    first, second = _request([[0, 1], [1, 2], [2, 3], [0, 1], [3, 2]]), _request([[0, 1], [0, 1]], 1)
    stats = _stats(tmp_path, [first, second])
    # Windows of two: {0,1,2}, {0,1,2,3}, {0,1}; of four: {0,1,2,3}.
    assert stats.distinct[0, :3] == pytest.approx([2, 3, 4])
    assert np.isnan(stats.distinct[0, 3:]).all()


def test_long_requests_equal_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cutting a request into blocks changes no number."""
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(4), (300, 1)), axis=1)[:, :2].tolist()
    whole = _stats(tmp_path, [_request(ids)])
    monkeypatch.setattr("moesim.trace.routing_stats._BLOCK_TOKENS", 64)
    cut = _stats(tmp_path, [_request(ids)])
    assert cut.counts.tolist() == whole.counts.tolist()
    np.testing.assert_array_equal(cut.distinct, whole.distinct)


def test_lookahead(tmp_path: Path) -> None:
    """Two of four experts found in the two best, first guess used once in two tokens; unknown rows are left out."""
    lookahead = np.array([[[0.9, 0.8, 0.1, 0]], [[0.1, 0.2, 0.8, 0.9]], [[np.nan] * 4]], np.float16)
    stats = _stats(tmp_path, [_request([[0, 2], [2, 1], [0, 1]], lookahead=lookahead)])
    assert (stats.recall[0], stats.first_used[0]) == (0.5, 0.5)


def test_gaps(tmp_path: Path) -> None:
    """The gap is lowest selected less highest unselected score; a selection that is not the best is counted apart."""
    scores = np.array([[[0.9, 0.8, 0.3, 0]], [[0.9, 0.2, 0.8, 0.1]], [[0.5, 0.5, 0.5, 0]]], np.float16)
    stats = _stats(tmp_path, [_request([[0, 1], [0, 1], [0, 1]], scores=scores)])
    assert (stats.n_gaps[0], stats.n_unexplained[0]) == (3, 1)
    at = int(np.flatnonzero(stats.gap_counts[0])[-1])
    assert GAP_EDGES[at] <= 0.5 < GAP_EDGES[at + 1]
    # Equal scores and the unexplained selection share the lowest bin.
    assert stats.gap_counts[0, 0] == 2
    assert stats.gap_quantile(0.5)[0] == pytest.approx(GAP_EDGES[0])
    assert stats.gap_quantile(0.9)[0] == GAP_EDGES[at]


def test_domains(tmp_path: Path) -> None:
    """Domains without a common expert diverge by one bit, alike ones by none; no domain is none."""
    pairs = [("a", [0, 1]), ("b", [2, 3]), ("c", [0, 1]), (None, [1, 2])]
    stats = _stats(tmp_path, [_request([ids] * 3, number, name) for number, (name, ids) in enumerate(pairs)])
    assert stats.domains == ("a", "b", "c")
    np.testing.assert_allclose(stats.divergence, [[0, 1, 0], [1, 0, 1], [0, 1, 0]], atol=1e-12)
    assert sorted(stats.domain_pairs) == pytest.approx([0, 1, 1], abs=1e-12)
    assert stats.counts.sum() == 24


def test_phases(tmp_path: Path) -> None:
    """Decode tokens are taken where there are any, else the prompt; a phase without tokens is refused."""
    mixed, prompt = _request([[0, 1], [2, 3]], n_prompt=1), _request([[0, 1]], n_prompt=1)
    assert _stats(tmp_path, [mixed]).counts.tolist() == [[0, 0, 1, 1]]
    assert _stats(tmp_path, [mixed], phase="all").n_tokens == 2
    assert _stats(tmp_path, [mixed], phase="prefill").counts.tolist() == [[1, 1, 0, 0]]
    assert _stats(tmp_path, [prompt]).phase == "prefill"
    with pytest.raises(ConfigError, match=r"t\.parquet has no tokens of phase 'decode'"):
        _stats(tmp_path, [prompt], phase="decode")


def test_holes_count_nothing(tmp_path: Path) -> None:
    """A hole is no selection: not counted, not sought, without a gap."""
    scores = np.full((4, 1, 4), 0.5, np.float16)
    columns = {"scores": scores, "lookahead": scores}
    stats = _stats(tmp_path, [_request([[0, 1], [0, 1], [-1, -1], [0, 1]], **columns)])
    assert stats.counts.tolist() == [[3, 3, 0, 0]]
    assert stats.overlap[0, :2].tolist() == [0.5, 0.5]
    assert (stats.recall[0], stats.first_used[0]) == (1, 1)
    assert stats.n_gaps[0] == 3


def test_layers_of_different_sizes(tmp_path: Path) -> None:
    """Each layer is judged by its own number of experts, and hash-routed layers have no score gaps."""
    shape = ModelShape(
        name="toy", n_layers=2, n_experts=(4, 8), top_k=(2, 3), layer_index=(0, 1), routing=("topk", "hash")
    )
    path = write_requests(tmp_path / "t.parquet", shape, [make_request(shape, number, 0, 40) for number in range(4)])
    stats = collect_stats(TraceReader(path))
    assert stats.gini.max() < 0.3
    assert stats.distinct[:, 0].tolist() == [2, 3]
    assert stats.n_gaps.tolist() == [160, 0]
    assert np.isnan(stats.gap_quantile(0.5)).tolist() == [False, True]


@pytest.fixture(scope="module")
def gptoss() -> RoutingStats:
    """Collect the real trace of gpt-oss-20b once."""
    return collect_stats(TraceReader(TRACES / "gptoss20b_decode.parquet"))


def test_gptoss_matches_its_published_figures(gptoss: RoutingStats) -> None:
    """The data card's figures of gpt-oss-20b come out, to the last printed digit."""
    assert (gptoss.n_requests, gptoss.n_tokens, gptoss.phase) == (139, 48_112, "decode")
    assert [gptoss.gini.mean(), gptoss.gini.min(), gptoss.gini.max()] == pytest.approx([0.40, 0.25, 0.49], abs=0.006)
    assert gptoss.hottest_quarter.mean() == pytest.approx(0.50, abs=0.006)
    assert gptoss.chance.mean() == pytest.approx(0.19, abs=0.006)
    assert gptoss.overlap.mean(axis=0) == pytest.approx([0.43, 0.38, 0.36, 0.35, 0.34, 0.32], abs=0.006)
    assert [gptoss.overlap[:, 0].min(), gptoss.overlap[:, 0].max()] == pytest.approx([0.19, 0.59], abs=0.006)
    assert [gptoss.domain_pairs.mean(), gptoss.domain_pairs.max()] == pytest.approx([0.14, 0.30], abs=0.006)
    assert len(gptoss.domains) == 7


def test_tiny_moe_matches_its_published_figures() -> None:
    """The tiny model's small trace has the figures of its full trace, within 0.03."""
    stats = collect_stats(TraceReader(TRACES / "tiny_moe_trace_small.parquet"))
    assert stats.gini.mean() == pytest.approx(0.146, abs=0.03)
    assert stats.hottest_quarter.mean() == pytest.approx(0.34, abs=0.03)
    assert stats.chance.mean() == pytest.approx(0.07, abs=0.01)
    assert stats.overlap.mean(axis=0) == pytest.approx([0.16, 0.13, 0.14, 0.13, 0.12, 0.10], abs=0.015)
    assert [stats.domain_pairs.mean(), stats.domain_pairs.max()] == pytest.approx([0.17, 0.26], abs=0.03)
    # Lookahead finds far more than the token before.
    assert np.nanmean(stats.recall) > 3 * stats.overlap[:, 0].mean()
    assert np.isnan(stats.recall[0])
    assert stats.n_unexplained.sum() == 0


def _run(*words: str | Path, exit_code: int = 0) -> str:
    """Run the command and give its stdout."""
    result = CliRunner(env={"COLUMNS": "80"}).invoke(trace_app, ["stats", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result.stdout


def test_tables_fit_a_terminal(tmp_path: Path) -> None:
    """The tables of a trace with everything fit 80 columns, and say what the numbers mean."""
    text = _run(TRACES / "tiny_moe_trace_small.parquet")
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for words in (
        "2,560 decode tokens of 10 requests",
        "overlap at lag",
        "guess 1",
        "Jensen-Shannon",
        "Lookahead finds",
    ):
        assert words in text
    bare = _run(write_requests(tmp_path / "t.parquet", ModelShape.uniform("toy", 1, 4, 2), [_request([[0, 1]] * 3)]))
    assert "Lookahead: the trace has none." in bare
    assert "no scores of all experts" in bare
    assert "Jensen" not in bare


def test_json_and_files(tmp_path: Path) -> None:
    """--json prints one object; --out writes it with both pictures, the same bytes each time; --limit reads less."""
    trace, out = TRACES / "tiny_moe_trace_small.parquet", tmp_path / "new" / "out"
    answer = json.loads(_run(trace, "--json", "--out", out, "--limit", "3"))
    assert (answer["n_requests"], answer["n_tokens"]) == (3, 768)
    assert answer["layers"]["recall_at_k"][0] is None
    assert answer["lags"]["tokens"] == [1, 2, 4, 8, 16, 64]
    assert answer["provenance"]["kind"] == "imported"
    assert sorted(path.name for path in out.iterdir()) == ["trace_stats.json", "trace_stats.png", "trace_stats.svg"]
    written = json.loads((out / "trace_stats.json").read_text())
    assert written == {key: value for key, value in answer.items() if key != "files"}
    before = (out / "trace_stats.svg").read_bytes()
    _run(trace, "--out", out, "--limit", "3")
    assert (out / "trace_stats.svg").read_bytes() == before


def test_wrong_calls(tmp_path: Path) -> None:
    """A folder that cannot be made and a phase that is not there are refused in one line."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out"):
        _run(TRACES / "tiny_moe_trace_small.parquet", "--out", tmp_path / "file")
    with pytest.raises(ConfigError, match="choose another --phase"):
        _run(TRACES / "gptoss20b_decode.parquet", "--phase", "prefill", "--limit", "2")


def test_page_says_what_a_trace_cannot_tell(gptoss: RoutingStats) -> None:
    """A trace without scores and lookahead gets a page with the reasons, one with several domains their matrix."""
    texts = [text.get_text() for axes in draw_trace_stats(gptoss).axes for text in (*axes.texts, axes.title)]
    assert "the trace has no scores of all experts" in texts
    assert "What a guess finds (no lookahead in the trace)" in texts
    assert texts.count("0.30") == 2


def test_page_of_a_trace_with_next_to_nothing(tmp_path: Path) -> None:
    """One token of one layer without a domain draws without a warning."""
    figure = draw_trace_stats(_stats(tmp_path, [_request([[0, 1]], domain=None)]))
    assert "the trace has no domains" in [text.get_text() for axes in figure.axes for text in axes.texts]
