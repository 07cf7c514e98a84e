"""The check of a whole trace: errors request by request, and suspicions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesim.trace import ModelShape, RequestMeta, RequestTrace
from moesim.trace.validate import Report, validate_trace
from tests.trace.trace_helpers import make_request, rows_for, write_requests, write_rows


def codes(report: Report) -> list[tuple[str, str]]:
    """Give level and code of every finding."""
    return [(finding.level, finding.code) for finding in report.findings]


def decode_rows(ids_of_tokens: list[list[list[int]]], **columns: Any) -> Any:
    """Build rows of one request from ``[token][layer][rank]`` ids."""
    keys = [(0, token, layer) for token, layers in enumerate(ids_of_tokens) for layer in range(len(layers))]
    return rows_for(keys, [ids for layers in ids_of_tokens for ids in layers], **columns)


def test_report_counts(tmp_path: Path) -> None:
    """The report counts rows, requests, tokens by phase, holes and columns."""
    shape = ModelShape.uniform("toy", 2, 8, 2)
    request = make_request(shape, n_prompt=3, n_decode=4, with_all=False)
    ids = request.topk_ids.copy()
    ids[0, 1] = -1
    named = {name: getattr(request, name) for name in RequestTrace.__slots__} | {"topk_ids": ids}
    path = write_requests(
        tmp_path / "t.parquet", shape, [RequestTrace(**named), make_request(shape, 1, with_all=False)]
    )
    seen: list[tuple[int, int]] = []
    report = validate_trace(path, progress=lambda done, total: seen.append((done, total)))
    assert report.is_valid
    assert (report.n_files, report.n_rows, report.n_requests, report.n_tokens) == (1, 28, 2, 14)
    assert (report.n_prefill_tokens, report.n_decode_tokens, report.n_holes) == (6, 8, 1)
    assert report.columns == ["layer", "phase", "position", "request", "step", "topk_ids"]
    assert seen == [(1, 2), (2, 2)]
    assert report.to_json()["is_valid"] is True


@pytest.mark.parametrize(("n_layers", "is_suspicious"), [(4, True), (3, False)])
def test_c02_graph_replay(tmp_path: Path, n_layers: int, is_suspicious: bool) -> None:
    """Five decode tokens with the same experts in all of four layers raise a suspicion that names the first."""
    shape = ModelShape.uniform("toy", n_layers, 256, 2)
    path = write_rows(tmp_path / "t.parquet", shape, decode_rows([[[7, 9]] * n_layers] * 5))
    report = validate_trace(path)
    assert report.is_valid
    assert codes(report) == ([("warning", "graph_replay")] if is_suspicious else [])
    if is_suspicious:
        assert "request 0: 4 decode tokens, the first at position 1," in report.findings[0].message


def test_c02_one_layer_that_moves_is_enough(tmp_path: Path) -> None:
    """Tokens that differ in one layer raise no suspicion."""
    shape = ModelShape.uniform("toy", 4, 256, 2)
    tokens = [[[7, 9], [7, 9], [7, 9], [token, 99]] for token in range(5)]
    assert codes(validate_trace(write_rows(tmp_path / "t.parquet", shape, decode_rows(tokens)))) == []


def test_c03_c07_row_counts(tmp_path: Path) -> None:
    """Every request with a wrong number of rows is an error of its own; the others are counted."""
    shape = ModelShape.uniform("toy", 1, 8, 2)
    keys = [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 2, 0), (2, 0, 0), (2, 1, 0)]
    rows = rows_for(keys, [[0, 1], [2, 3]] * 3, n_prompt=9)
    described = tuple(RequestMeta(request=number, prompt_tokens=3 if number == 2 else None) for number in range(3))
    report = validate_trace(write_rows(tmp_path / "t.parquet", shape, rows, requests=described))
    assert not report.is_valid
    assert codes(report) == [("error", "rows")] * 2
    assert "request 1: 1 of 3 rows are missing: (position 1, layer 0)" in report.findings[0].message
    assert "prompt_tokens = 3" in report.findings[1].message
    assert (report.n_requests, report.n_tokens) == (1, 2)


def test_c15_filler(tmp_path: Path) -> None:
    """A last token that names experts 0..k-1 everywhere is suspected to be made up."""
    shape = ModelShape.uniform("toy", 2, 64, 2)
    tokens = [[[10, 11], [12, 13]], [[20, 21], [22, 23]], [[0, 1], [0, 1]]]
    report = validate_trace(write_rows(tmp_path / "t.parquet", shape, decode_rows(tokens)))
    assert codes(report) == [("warning", "filler")]
    assert "request 0, position 2" in report.findings[0].message
    tokens[2][1] = [1, 0]
    assert codes(validate_trace(write_rows(tmp_path / "t.parquet", shape, decode_rows(tokens)))) == []


def test_c13_and_c41_strict_and_lenient(tmp_path: Path) -> None:
    """What a strict check calls an error, a lenient one repairs and counts."""
    shape = ModelShape.uniform("toy", 1, 4, 2)
    scores = np.full((3, 4), 0.25, np.float16)
    scores[1] = [0.2, np.nan, 0.2, 0.2]
    rows = decode_rows([[[2, 1]], [[0, 3]], [[3, 3]]], scores=scores)
    path = write_rows(tmp_path / "t.parquet", shape, rows)
    assert codes(validate_trace(path)) == [("error", "rows")]
    report = validate_trace(path, strict=False)
    assert report.is_valid
    assert (report.repairs.n_dropped_tokens, report.repairs.n_repeated_ids, report.n_tokens) == (1, 1, 2)


def test_silent_layers(tmp_path: Path) -> None:
    """A layer without any id is an error; one whose ids or scores are all zero is suspicious."""
    shape = ModelShape.uniform("toy", 3, 8, 1)
    path = write_rows(tmp_path / "t.parquet", shape, decode_rows([[[1], [-1], [2]], [[3], [-1], [2]]]))
    report = validate_trace(path)
    assert codes(report) == [("error", "silent_layer")]
    assert "no router output for 1 of 3 MoE layers" in report.findings[0].message
    write_rows(path, shape, decode_rows([[[1], [0], [2]], [[3], [0], [2]]]))
    report = validate_trace(path)
    assert codes(report) == [("warning", "zero_layer")]
    assert "layers [1]: every recorded id is 0" in report.findings[0].message
    scores = np.full((6, 8), 0.125, np.float16)
    scores[2::3] = 0
    write_rows(path, shape, decode_rows([[[1], [4], [2]], [[3], [5], [2]]], scores=scores))
    report = validate_trace(path)
    assert codes(report) == [("warning", "zero_layer")]
    assert "layers [2]: every router score is 0" in report.findings[0].message


def test_c64b_saturation(tmp_path: Path) -> None:
    """Scores at float16's limit are suspicious, infinite ones and infinite hidden states are errors."""
    shape = ModelShape.uniform("toy", 1, 4, 1, hidden_size=2)
    scores = np.full((2, 4), 0.5, np.float16)
    scores[1, 2] = 65504
    path = write_rows(tmp_path / "t.parquet", shape, decode_rows([[[1]], [[2]]], scores=scores))
    assert codes(validate_trace(path)) == [("warning", "saturation")]
    scores[1, 2] = np.inf
    write_rows(path, shape, decode_rows([[[1]], [[2]]], scores=scores))
    assert codes(validate_trace(path)) == [("error", "rows")]
    hidden = np.array([[0x3F80, 0x3F80], [0x7F80, 0]], np.uint16)
    write_rows(path, shape, decode_rows([[[1]], [[2]]], hidden=hidden))
    assert codes(validate_trace(path)) == [("error", "saturation")]


def test_unreadable(tmp_path: Path) -> None:
    """A file that is no trace gives one error instead of an exception."""
    path = tmp_path / "t.parquet"
    path.write_bytes(b"")
    report = validate_trace(path)
    assert codes(report) == [("error", "unreadable")]
    assert "t.parquet: not a readable trace" in report.findings[0].message
