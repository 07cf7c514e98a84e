"""Foreign files become traces without a changed value."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moesim.errors import TraceFormatError
from moesim.trace import Provenance, TraceReader
from moesim.trace.importers.bigmoeonedge_csv import import_bigmoeonedge_csv
from moesim.trace.importers.flat_lists import import_flat_lists
from moesim.trace.stats import expert_counts, gini, lag_overlap, lookahead_recall
from moesim.trace.tables import TableMeta, read_table, write_table
from moesim.trace.validate import validate_trace
from tests.trace.trace_helpers import read_all

TRACES = Path(__file__).parents[2] / "traces"
FACTS = {
    "model": "someone/Toy-MoE (Q4 GGUF)",
    "num_experts": "4",
    "top_k": "2",
    "scores_kind": "weights of the selected experts only (rank order)",
    "source": "somewhere",
    "license": "Apache-2.0",
    "expert_bytes_per_layer": "[10, 20]",
}


def flat_rows(skip: set[tuple[int, int]] = frozenset({(0, 1), (1, 1)})) -> dict[str, list[Any]]:
    """Give a prompt of 3 and a decode token in 2 layers, layer by layer, without the (token, layer) pairs to skip."""
    keys = [(token, layer) for layer in range(2) for token in range(4) if (token, layer) not in skip]
    return {
        "request": [3] * len(keys),
        "token": [token for token, _ in keys],
        "layer": [layer for _, layer in keys],
        "phase": ["prefill" if token < 3 else "decode" for token, _ in keys],
        "experts": [[token, (token + layer + 1) % 4] for token, layer in keys],
        "scores": [[0.7001953125, 0.2998046875]] * len(keys),
        "domain": ["general"] * len(keys),
    }


def write_flat(path: Path, rows: dict[str, list[Any]], **facts: str) -> Path:
    """Write a flat-list file."""
    types = {
        "request": pa.int32(),
        "token": pa.int32(),
        "layer": pa.int16(),
        "phase": pa.string(),
        "experts": pa.list_(pa.int16()),
        "scores": pa.list_(pa.float16()),
        "domain": pa.string(),
        "lookahead": pa.list_(pa.float16()),
        "weights": pa.list_(pa.float16()),
        "token_id": pa.int32(),
    }
    schema = pa.schema([(name, types[name]) for name in rows], metadata=FACTS | facts)
    pq.write_table(pa.table(rows, schema=schema), path)
    return path


def test_flat_lists_of_selected_weights(tmp_path: Path) -> None:
    """Weights keep their float16 values, missing rows of the last layer's prefill become holes, prefill is step 0."""
    meta = import_flat_lists(write_flat(tmp_path / "f.parquet", flat_rows()), tmp_path / "t.parquet")
    assert (meta.model.name, meta.model.n_layers, meta.expert_bytes) == ("Toy-MoE", 2, (10, 20))
    assert meta.provenance == Provenance(
        kind="imported",
        source="somewhere",
        licence="Apache-2.0",
        note=f"variant: Q4 GGUF; scores_kind: {FACTS['scores_kind']}",
    )
    (request,) = read_all(tmp_path / "t.parquet", ("topk_weights",))
    assert (request.request, request.domain, request.prompt_tokens) == (3, "general", 3)
    assert request.topk_ids.tolist() == [
        [[0, 1], [-1, -1]],
        [[1, 2], [-1, -1]],
        [[2, 3], [2, 0]],
        [[3, 0], [3, 1]],
    ]
    assert request.step.tolist() == [0, 0, 0, 1]
    assert request.is_decode.tolist() == [False, False, False, True]
    assert request.topk_weights is not None
    assert request.topk_weights[2, 1].tolist() == [0.7001953125, 0.2998046875]
    assert np.isnan(request.topk_weights[0, 1]).all()


def test_flat_lists_of_all_scores(tmp_path: Path) -> None:
    """Scores of all experts, weights, lookahead with its nulls and token ids land in their own columns."""
    rows = flat_rows(set())
    n_rows = len(rows["token"])
    rows["scores"] = [[0.1, 0.2, 0.3, 0.4]] * n_rows
    rows["weights"] = [[0.5, 0.25]] * n_rows
    rows["lookahead"] = [None if layer == 0 else [0.4, 0.3, 0.2, 0.1] for layer in rows["layer"]]
    rows["token_id"] = [token + 100 for token in rows["token"]]
    path = write_flat(
        tmp_path / "f.parquet",
        rows,
        scores_kind="softmax router probabilities of all experts",
        weights_kind="renormalised",
        lookahead_kind="one layer earlier",
    )
    meta = import_flat_lists(path, tmp_path / "t.parquet", licence="other")
    assert (meta.score_kind, meta.weights_kind, meta.lookahead_source) == (
        "softmax",
        "renormalised",
        "one layer earlier",
    )
    assert meta.provenance.licence == "other"
    (request,) = read_all(tmp_path / "t.parquet", ("topk_weights", "scores", "lookahead", "token_id"))
    assert request.scores is not None
    assert request.scores[3, 1].tolist() == np.array([0.1, 0.2, 0.3, 0.4], np.float16).tolist()
    assert request.lookahead is not None
    assert np.isnan(request.lookahead[:, 0]).all()
    assert request.lookahead[0, 1].tolist() == np.array([0.4, 0.3, 0.2, 0.1], np.float16).tolist()
    assert request.topk_weights is not None
    assert request.topk_weights[0, 0].tolist() == [0.5, 0.25]
    assert request.token_id is not None
    assert request.token_id.tolist() == [100, 101, 102, 103]


def test_flat_lists_of_decode_only(tmp_path: Path) -> None:
    """Where only decode was recorded, the first position is the prompt's length and the first step is 1."""
    rows = {name: values[:0] for name, values in flat_rows().items()}
    for token, layer in [(5, 0), (5, 1), (6, 0), (6, 1)]:
        for name, value in zip(rows, (0, token, layer, "decode", [0, 1], [0.5, 0.5], "math"), strict=True):
            rows[name].append(value)
    import_flat_lists(write_flat(tmp_path / "f.parquet", rows), tmp_path / "t.parquet")
    (request,) = read_all(tmp_path / "t.parquet")
    assert (request.prompt_tokens, request.step.tolist(), request.position.tolist()) == (5, [1, 2], [5, 6])


@pytest.mark.parametrize(
    ("skip", "message"),
    [({(1, 0)}, "position 1, layer 0: this row is missing"), ({(3, 1)}, "position 3, layer 1: this row is missing")],
)
def test_flat_lists_with_other_gaps(tmp_path: Path, skip: set[tuple[int, int]], message: str) -> None:
    """A gap anywhere but in the last layer's prefill is refused."""
    path = write_flat(tmp_path / "f.parquet", flat_rows(skip))
    with pytest.raises(TraceFormatError, match=message):
        import_flat_lists(path, tmp_path / "t.parquet")
    assert not (tmp_path / "t.parquet").exists()


def test_flat_lists_that_are_none(tmp_path: Path) -> None:
    """Files with too short lists, rows given twice, or without the columns are refused by name."""
    rows = flat_rows()
    rows["experts"][2] = [1]
    with pytest.raises(TraceFormatError, match=r"f\.parquet: column 'experts' has 1 values in row 2"):
        import_flat_lists(write_flat(tmp_path / "f.parquet", rows), tmp_path / "t.parquet")
    rows = flat_rows()
    rows["token"][1] = 0
    with pytest.raises(TraceFormatError, match="position 0, layer 0: this row is given twice"):
        import_flat_lists(write_flat(tmp_path / "f.parquet", rows), tmp_path / "t.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "f.parquet")
    with pytest.raises(TraceFormatError, match="not a flat-list trace"):
        import_flat_lists(tmp_path / "f.parquet", tmp_path / "t.parquet")


CSV = """# route_trace v1
# model=/data/Toy-Q4.gguf arch=toy n_layer=4 n_expert=8 n_expert_used=2
# layer=1 expert_bytes=300 dense_bytes=1
# layer=3 expert_bytes=400 dense_bytes=1
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped
0,0,0,1,0,5,0.75,0,300,0
0,0,0,1,1,2,0.25,0,300,0
0,0,1,1,1,0,0.25,1,0,0
0,0,1,1,0,7,0.75,1,0,0
0,0,1,3,0,4,0.5,0,400,0
0,0,1,3,1,6,0.5,0,400,0
0,1,2,1,0,1,0.625,0,300,0
0,1,2,1,1,3,nan,0,300,0
0,1,2,3,0,0,0.5,0,400,0
0,1,2,3,1,7,0.5,0,400,0
1,1,3,1,0,1,0.5,0,300,0
1,1,3,1,1,4,0.5,0,300,0
1,1,3,3,0,0,0.5,0,400,0
1,1,3,3,1,7,0.5,0,400,0
"""


def test_bigmoeonedge_csv(tmp_path: Path) -> None:
    """Turns become requests, slots ranks, absolute steps positions, and dense layers stay out of the layer count."""
    source = tmp_path / "route.csv"
    source.write_text(CSV.replace(",nan,", ",0.375,"))
    meta = import_bigmoeonedge_csv(source, tmp_path / "t.parquet", domain="chat", licence="Apache-2.0")
    assert (meta.model.name, meta.model.layer_index, meta.expert_bytes) == ("Toy-Q4", (1, 3), (300, 400))
    first, second = read_all(tmp_path / "t.parquet", ("topk_weights",))
    assert first.topk_ids.tolist() == [[[5, 2], [-1, -1]], [[7, 0], [4, 6]], [[1, 3], [0, 7]]]
    assert first.topk_weights is not None
    assert first.topk_weights[1, 0].tolist() == [0.75, 0.25]
    assert (first.domain, first.prompt_tokens, first.step.tolist()) == ("chat", 2, [0, 0, 1])
    assert (second.position.tolist(), second.prompt_tokens, second.step.tolist()) == ([3], 3, [1])


def test_bigmoeonedge_csv_with_faults(tmp_path: Path) -> None:
    """Half a cell, an unknown weight beside a known one, and a missing preamble are refused."""
    source = tmp_path / "route.csv"
    for text, message in (
        (CSV.replace("0,1,2,3,1,7,0.5,0,400,0\n", ""), "turn 0, step 2, layer 3"),
        (CSV, "topk_weights has a NaN"),
        (CSV.replace("n_expert_used=2", ""), "n_expert_used"),
        ("", "not a readable trace"),
    ):
        source.write_text(text)
        with pytest.raises(TraceFormatError, match=message):
            import_bigmoeonedge_csv(source, tmp_path / "t.parquet")


# Values copied by hand from the files that were imported.
GPTOSS_ROWS = [
    (0, 134, 0, [31, 21, 22, 6], [0.498046875, 0.1806640625, 0.1669921875, 0.1533203125]),
    (0, 134, 2, [29, 8, 4, 31], [0.51953125, 0.1650390625, 0.1611328125, 0.1552734375]),
]


def test_gptoss_trace() -> None:
    """The gpt-oss-20b trace has the original's rows, requests and published statistics."""
    reader = TraceReader(TRACES / "gptoss20b_decode.parquet")
    shape = reader.meta.model
    assert (shape.name, shape.n_layers, shape.max_experts, shape.max_top_k) == ("gpt-oss-20b", 24, 32, 4)
    requests = list(reader.requests(["topk_weights"]))
    assert (len(requests), sum(request.n_tokens for request in requests)) == (139, 48_112)
    for number, position, layer, ids, weights in GPTOSS_ROWS:
        request = requests[number]
        token = position - int(request.position[0])
        assert request.topk_ids[token, layer].tolist() == ids
        assert request.topk_weights is not None
        assert request.topk_weights[token, layer].tolist() == weights
    assert (requests[0].prompt_tokens, requests[0].domain, requests[0].step[:2].tolist()) == (134, "business", [1, 2])
    popularity = gini(expert_counts(requests, shape))
    assert [round(float(value), 2) for value in (popularity.mean(), popularity.min(), popularity.max())] == [
        0.40,
        0.25,
        0.49,
    ]
    overlap = lag_overlap(requests, shape, (1, 2, 4, 8, 16, 64)).mean(axis=0)
    np.testing.assert_allclose(overlap, [0.43, 0.38, 0.36, 0.35, 0.34, 0.32], atol=0.006)


@pytest.mark.parametrize(
    ("name", "model", "n_prompt", "n_decode", "first", "weights", "n_holes"),
    [
        ("bigmoeonedge_gptoss", "gpt-oss-120b", 85, 64, [83, 30], [0.529296875, 0.470458984375], 84),
        (
            "bigmoeonedge_qwen",
            "Qwen3-30B-A3B",
            28,
            128,
            [49, 19, 58, 29, 16, 70],
            [0.2213134765625, 0.19189453125, 0.1907958984375, 0.1470947265625, 0.13671875, 0.1121826171875],
            27,
        ),
    ],
)
def test_phone_traces(
    name: str, model: str, n_prompt: int, n_decode: int, first: list[int], weights: list[float], n_holes: int
) -> None:
    """The phone traces have the original's rows, and holes only in the last layer's prefill."""
    reader = TraceReader(TRACES / f"{name}.parquet")
    (request,) = reader.requests(["topk_weights"])
    assert (reader.meta.model.name, request.prompt_tokens, request.n_decode_tokens) == (model, n_prompt, n_decode)
    assert request.topk_ids[0, 0].tolist() == first
    assert request.topk_weights is not None
    assert request.topk_weights[0, 0].tolist() == weights
    holes = (request.topk_ids < 0).all(axis=2)
    assert holes.sum() == holes[: n_prompt - 1, -1].sum() == n_holes
    assert reader.meta.expert_bytes is not None
    assert set(reader.meta.expert_bytes) <= {13219200, 3059712, 2654208}


def test_tiny_moe_trace() -> None:
    """The tiny-moe trace has the original's values and its published lookahead recall."""
    reader = TraceReader(TRACES / "tiny_moe_trace_small.parquet")
    requests = list(reader.requests(["scores", "lookahead", "token_id", "topk_weights"]))
    assert [request.request for request in requests] == [0, 4, 12, 16, 24, 28, 36, 40, 48, 52]
    first = requests[0]
    assert first.topk_ids[0, 0].tolist() == [27, 31, 36, 4]
    assert first.scores is not None
    assert first.scores[0, 0, [0, 1, 2, 3, 27]].tolist() == [
        0.0040283203125,
        0.00372314453125,
        0.0146484375,
        0.02001953125,
        0.2578125,
    ]
    recall = lookahead_recall(requests, reader.meta.model, phase="decode")
    np.testing.assert_allclose(recall[1:], [0.09, 0.71, 0.78, 0.79, 0.72, 0.79, 0.83], atol=0.006)


@pytest.mark.parametrize("name", ["bigmoeonedge_gptoss", "bigmoeonedge_qwen", "tiny_moe_trace_small"])
def test_shipped_traces_are_clean(name: str) -> None:
    """Shipped traces have no fault and raise no suspicion."""
    report = validate_trace(TRACES / f"{name}.parquet")
    assert report.is_valid
    assert report.findings == []


def test_shipped_traces_are_small() -> None:
    """All data files together stay below 20 MB, and each is named in the data card."""
    files = list(TRACES.glob("*.parquet"))
    assert sum(file.stat().st_size for file in files) < 20e6
    card = (TRACES / "README.md").read_text()
    assert all(file.name in card for file in files)


def test_tables() -> None:
    """The popularity tables hold the original's rows."""
    meta, counts = read_table(TRACES / "expert_counts.parquet", "counts")
    assert (meta.provenance.kind, len(counts)) == ("imported", 32_376)
    row = counts.iloc[0]
    assert (row["model"], row["domain"], row["count"]) == ("allenai/OLMoE-1B-7B-0924", "arxiv", 204_013)
    _, hot = read_table(TRACES / "domain_hotlists.parquet", "hotlists")
    assert len(hot) == 44_959
    assert hot.iloc[:3]["expert"].tolist() == [99, 75, 138]


def test_tables_of_the_wrong_kind(tmp_path: Path) -> None:
    """A table is not read as another kind, nor as a trace, nor a trace as a table."""
    counts = TRACES / "expert_counts.parquet"
    with pytest.raises(TraceFormatError, match="is of kind 'counts', needed is 'hotlists'"):
        read_table(counts, "hotlists")
    with pytest.raises(TraceFormatError, match="is of kind 'counts', not a router trace"):
        TraceReader(counts)
    with pytest.raises(TraceFormatError, match="is of kind 'trace', needed is 'counts'"):
        read_table(TRACES / "bigmoeonedge_qwen.parquet", "counts")
    meta = TableMeta(kind="counts", provenance=Provenance(kind="imported", source="s", licence="l"))
    with pytest.raises(TraceFormatError, match="a table of kind 'counts' has"):
        write_table(tmp_path / "t.parquet", pa.table({"a": [1]}), meta)
    (tmp_path / "short.parquet").write_bytes(counts.read_bytes()[:-9])
    with pytest.raises(TraceFormatError, match=r"short\.parquet: not a readable"):
        read_table(tmp_path / "short.parquet", "counts")


def test_footer_is_plain_json() -> None:
    """Another tool can read the metadata: it is JSON under the key moesim."""
    with pq.ParquetFile(TRACES / "bigmoeonedge_qwen.parquet") as file:
        content = json.loads(file.metadata.metadata[b"moesim"])
    assert (content["schema_version"], content["model"]["n_layers"]) == (1, 48)
