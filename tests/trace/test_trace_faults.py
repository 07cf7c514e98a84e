"""What the reader refuses, and what a lenient reader repairs and counts."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moesim.errors import TraceFormatError
from moesim.trace import ModelShape, RequestMeta, TraceReader, TraceWriter
from moesim.trace.columns import to_numpy
from moesim.trace.stats import expert_counts
from tests.trace.trace_helpers import (
    make_meta,
    make_request,
    read_all,
    rewrite,
    rows_for,
    write_requests,
    write_rows,
)

SHAPE = ModelShape.uniform("toy", 3, 8, 2, hidden_size=4)


def one_layer(n_experts: int, top_k: int) -> ModelShape:
    """Shape of a model with a single MoE layer."""
    return ModelShape.uniform("one", 1, n_experts, top_k)


def test_c05_sentinel_of_shared_experts(tmp_path: Path) -> None:
    """Eight columns whose last two hold 255 do not fit k = 6, and 255 is refused as an id of 64 experts."""
    shape = one_layer(64, 6)
    wide = rows_for([(0, 0, 0)], [[1, 2, 3, 4, 5, 6, 255, 255]])
    writer = TraceWriter(tmp_path / "t.parquet", make_meta(shape))
    with pytest.raises(TraceFormatError, match="'topk_ids' has width 8, the model needs 6"):
        writer.write_rows(wide)
    writer.abort()
    path = write_rows(tmp_path / "t.parquet", shape, rows_for([(0, 0, 0)], [[1, 2, 3, 4, 255, 63]]))
    for strict in (True, False):
        with pytest.raises(
            TraceFormatError, match=r"t.parquet: request 0, position 0, layer 0: an id is past .*, 63 .*255"
        ):
            read_all(path, strict=strict)


def test_c07_missing_rows(tmp_path: Path) -> None:
    """Of 64 x 10 x 3 rows two are lost: an error names their keys, in strict and in lenient mode."""
    keys = [(request, position, layer) for request in range(64) for position in range(10) for layer in range(3)]
    lost = {(5, 4, 1), (5, 7, 2)}
    kept = [key for key in keys if key not in lost]
    path = write_rows(tmp_path / "t.parquet", SHAPE, rows_for(kept, [[0, 1]] * 1918))
    for strict in (True, False):
        message = r"request 5: 2 of 30 rows are missing: \(position 4, layer 1\), \(position 7, layer 2\)"
        with pytest.raises(TraceFormatError, match=message):
            read_all(path, strict=strict)


@pytest.mark.parametrize(("n_rows", "is_right"), [(6, False), (7, True), (8, False)])
def test_c03_prompt_length(tmp_path: Path, n_rows: int, is_right: bool) -> None:
    """A prompt of 7 tokens has 7 prefill rows in a layer, no fewer and no more."""
    keys = [(0, position, 0) for position in range(n_rows)]
    path = write_rows(
        tmp_path / "t.parquet",
        one_layer(8, 2),
        rows_for(keys, [[0, 1]] * n_rows, n_prompt=99),
        requests=(RequestMeta(request=0, prompt_tokens=7),),
    )
    if is_right:
        assert read_all(path)[0].n_tokens == 7
    else:
        with pytest.raises(TraceFormatError, match=f"prompt ends at position {n_rows} .* prompt_tokens = 7"):
            read_all(path)


def test_c03_decode_starts_after_the_prompt(tmp_path: Path) -> None:
    """A decode-only trace begins where the prompt ends."""
    rows = rows_for([(0, 6, 0), (0, 7, 0)], [[0, 1]] * 2)
    path = write_rows(
        tmp_path / "t.parquet", one_layer(8, 2), rows, requests=(RequestMeta(request=0, prompt_tokens=7),)
    )
    with pytest.raises(TraceFormatError, match="prompt ends at position 6"):
        read_all(path)


def test_c09_rows_of_two_ranks(tmp_path: Path) -> None:
    """Ten rows written by both ranks are refused, or counted once by a lenient reader; different ids never pass."""
    shape = one_layer(8, 2)
    keys = [(0, position, 0) for position in range(10)]
    ids = [[position % 8, (position + 1) % 8] for position in range(10)]
    path = write_rows(tmp_path / "t.parquet", shape, rows_for(keys * 2, ids * 2))
    with pytest.raises(TraceFormatError, match="position 0, layer 0: row is written twice \\(10 such rows\\)"):
        read_all(path)
    reader = TraceReader(path, strict=False)
    requests = list(reader.requests())
    assert requests[0].n_tokens == 10
    assert expert_counts(requests, shape).sum() == 20
    assert next(reader.requests()).n_tokens == 10
    assert reader.repairs.n_duplicate_rows == 10

    ids_of_rank_1 = [[7, 6] if position == 3 else row for position, row in enumerate(ids)]
    write_rows(path, shape, rows_for(keys * 2, ids + ids_of_rank_1))
    for strict in (True, False):
        with pytest.raises(TraceFormatError, match=r"position 3, layer 0: two rows .* \[3, 4\] and \[7, 6\]"):
            read_all(path, strict=strict)


def scored(scores: list[list[float]], ids: list[list[int]]) -> Any:
    """Rows of one request, one layer, with scores."""
    keys = [(0, position, 0) for position in range(len(ids))]
    return rows_for(keys, ids, scores=np.array(scores, np.float16))


def test_c13_nan_scores(tmp_path: Path) -> None:
    """A token with NaN scores is refused, or dropped and counted so that 4 selections remain, asked for or not."""
    shape = one_layer(4, 2)
    good = [0.4, 0.3, 0.2, 0.1]
    path = write_rows(tmp_path / "t.parquet", shape, scored([good, [np.nan] * 4, good], [[0, 1], [0, 0], [0, 1]]))
    with pytest.raises(TraceFormatError, match="position 1, layer 0: an expert is named twice"):
        read_all(path)
    write_rows(path, shape, scored([good, [np.nan] * 4, good], [[0, 1], [0, 1], [0, 1]]))
    with pytest.raises(TraceFormatError, match="position 1, layer 0: scores is missing"):
        read_all(path, ("scores",))
    write_rows(path, shape, scored([good, [0.4, np.nan, 0.2, 0.1], good], [[0, 1], [0, 0], [0, 1]]))
    for columns in ((), ("scores",)):
        reader = TraceReader(path, strict=False)
        requests = list(reader.requests(columns))
        assert requests[0].position.tolist() == [0, 2]
        assert expert_counts(requests, shape).sum() == 4
        assert reader.repairs.n_dropped_tokens == 1
        assert (requests[0].scores is None) == (columns == ())


@pytest.mark.parametrize("past", [4, 5])
def test_c13_ids_of_nan_scores(tmp_path: Path, past: int) -> None:
    """An id at or past E is an error in every mode."""
    rows = rows_for([(0, 0, 0), (0, 1, 0)], [[0, 1], [past, 1]])
    path = write_rows(tmp_path / "t.parquet", one_layer(4, 2), rows)
    for strict in (True, False):
        with pytest.raises(TraceFormatError, match=f"position 1, layer 0: an id is past .* 3 .*{past}, 1"):
            read_all(path, strict=strict)


def test_c13_infinite_scores(tmp_path: Path) -> None:
    """An infinite score spoils comparisons like a NaN and is treated alike."""
    path = write_rows(tmp_path / "t.parquet", one_layer(4, 2), scored([[np.inf, 0.3, 0.2, 0.1]], [[0, 1]]))
    with pytest.raises(TraceFormatError, match="NaN or an infinity"):
        read_all(path, ("scores",))
    assert read_all(path, ("scores",), strict=False) == []


def test_c13_nan_lookahead_and_weights(tmp_path: Path) -> None:
    """A NaN within a lookahead or weight row is refused, or makes the row missing and is counted."""
    lookahead = np.full((2, 4), 0.25, np.float16)
    lookahead[1, 2] = np.nan
    weights = np.array([[0.6, np.nan], [0.5, 0.5]], np.float32)
    rows = rows_for([(0, 0, 0), (0, 1, 0)], [[0, 1]] * 2, lookahead=lookahead, topk_weights=weights)
    path = write_rows(tmp_path / "t.parquet", one_layer(4, 2), rows)
    with pytest.raises(TraceFormatError, match="position 1, layer 0: lookahead has a NaN"):
        read_all(path, ("lookahead",))
    with pytest.raises(TraceFormatError, match="position 0, layer 0: topk_weights has a NaN"):
        read_all(path, ("topk_weights",))
    reader = TraceReader(path, strict=False)
    request = next(reader.requests(["lookahead", "topk_weights"]))
    assert request.lookahead is not None
    assert np.isnan(request.lookahead).all(axis=2).tolist() == [[False], [True]]
    assert (reader.repairs.n_missing_lookaheads, reader.repairs.n_missing_weights) == (1, 1)


def test_c15_token_that_never_ran(tmp_path: Path) -> None:
    """Without a made-up row for the last token, a turn's trace has two rows and experts 0 and 1 get no credit."""
    shape = one_layer(64, 2)
    turn_1 = rows_for([(0, 0, 0), (0, 1, 0)], [[10, 11], [20, 21]], n_prompt=2)
    turn_2 = rows_for([(1, position, 0) for position in range(3)], [[10, 11], [20, 21], [30, 31]], n_prompt=3)
    path = tmp_path / "t.parquet"
    with TraceWriter(path, make_meta(shape)) as writer:
        writer.write_rows(turn_1)
        writer.write_rows(turn_2)
    requests = read_all(path)
    assert [request.n_tokens for request in requests] == [2, 3]
    assert requests[1].topk_ids[2, 0].tolist() == [30, 31]
    assert expert_counts(requests, shape)[0, :2].tolist() == [0, 0]


def test_c41_expert_named_twice(tmp_path: Path) -> None:
    """The row [5, 5, 1, 2, 3, 4] is refused, or read as five experts and a hole by a lenient reader."""
    shape = one_layer(64, 6)
    path = write_rows(tmp_path / "t.parquet", shape, rows_for([(0, 0, 0)], [[5, 5, 1, 2, 3, 4]]))
    with pytest.raises(TraceFormatError, match=r"an expert is named twice \(ids \[5, 5, 1, 2, 3, 4\]"):
        read_all(path)
    reader = TraceReader(path, strict=False)
    assert next(reader.requests()).topk_ids.tolist() == [[[5, -1, 1, 2, 3, 4]]]
    assert reader.repairs.n_repeated_ids == 1


def test_c61_shards_in_text_order(tmp_path: Path) -> None:
    """Shards part-0 to part-11 with one token each come back as positions 0 to 11."""
    for position in range(12):
        row = rows_for([(0, position, 0)], [[position, 63]])
        write_rows(tmp_path / f"part-{position}.parquet", one_layer(64, 2), row)
    request = read_all(tmp_path)[0]
    assert request.position.tolist() == list(range(12))
    assert request.topk_ids[:, 0, 0].tolist() == list(range(12))


def test_c61_any_row_order(tmp_path: Path) -> None:
    """Rows in any order, in any files and row groups, give the same requests as ordered ones."""
    keys = [(request, position, layer) for request in range(3) for position in range(5) for layer in range(3)]
    ids = [[number % 8, (number + 3) % 8] for number in range(len(keys))]
    order = np.random.default_rng(0).permutation(len(keys))
    (tmp_path / "shuffled").mkdir()
    for shard in range(3):
        part = order[shard::3]
        write_rows(
            tmp_path / "shuffled" / f"{9 - shard}.parquet",
            SHAPE,
            rows_for([keys[number] for number in part], [ids[number] for number in part], n_prompt=2),
        )
    write_rows(tmp_path / "ordered.parquet", SHAPE, rows_for(keys, ids, n_prompt=2))
    for left, right in zip(read_all(tmp_path / "shuffled"), read_all(tmp_path / "ordered.parquet"), strict=True):
        assert left.topk_ids.tolist() == right.topk_ids.tolist()
        assert left.step.tolist() == right.step.tolist()


def test_c61_duplicate_and_missing_shards(tmp_path: Path) -> None:
    """The same shard twice, and a shard too few, are errors."""
    for position in range(4):
        write_rows(tmp_path / f"part-{position}.parquet", one_layer(8, 2), rows_for([(0, position, 0)], [[0, 1]]))
    copy = tmp_path / "part-9.parquet"
    copy.write_bytes((tmp_path / "part-2.parquet").read_bytes())
    with pytest.raises(TraceFormatError, match=r"part-9.parquet: request 0, position 2, layer 0: row is written twice"):
        read_all(tmp_path)
    copy.unlink()
    (tmp_path / "part-1.parquet").unlink()
    with pytest.raises(TraceFormatError, match=r"1 of 4 rows are missing: \(position 1, layer 0\)"):
        read_all(tmp_path)


def test_c61_lost_request(tmp_path: Path) -> None:
    """A request that the metadata describes but no row belongs to is an error."""
    path = write_requests(tmp_path / "t.parquet", SHAPE, [make_request(SHAPE, number) for number in range(2)])

    def add_request(content: dict[str, Any]) -> dict[str, Any]:
        content["requests"].append({"request": 7, "domain": None, "prompt_tokens": None})
        return content

    rewrite(path, change_footer=add_request)
    with pytest.raises(TraceFormatError, match=r"requests \[7\] are either described"):
        read_all(path)


def test_c62_missing_column(tmp_path: Path) -> None:
    """A shard without the phase column is refused by name; so are shards with different columns."""
    for name, columns in (("a", ["topk_weights"]), ("b", ["topk_weights"])):
        write_requests(tmp_path / f"{name}.parquet", SHAPE, [make_request(SHAPE, ord(name))], columns=columns)
    assert len(read_all(tmp_path, ("topk_weights",))) == 2
    rewrite(tmp_path / "b.parquet", lambda table: table.drop_columns(["phase"]))
    with pytest.raises(TraceFormatError, match=r"b.parquet: required columns \['phase'\] are missing"):
        read_all(tmp_path)
    write_requests(tmp_path / "b.parquet", SHAPE, [make_request(SHAPE, 98)], columns=["topk_weights", "token_id"])
    with pytest.raises(TraceFormatError, match=r"b.parquet: columns \['token_id'\] are in this file or in a.parquet"):
        read_all(tmp_path)


def test_c62_null_phase(tmp_path: Path) -> None:
    """A null phase is an error, never a default."""
    path = write_requests(tmp_path / "t.parquet", SHAPE, [make_request(SHAPE)])

    def blank(table: pa.Table) -> pa.Table:
        words = table["phase"].to_pylist()
        words[4] = None
        field = pa.field("phase", pa.dictionary(pa.int8(), pa.string()))
        return table.set_column(2, field, pa.array(words).dictionary_encode().cast(field.type))

    rewrite(path, blank)
    with pytest.raises(TraceFormatError, match=r"t\.parquet: row group 0: column 'phase' is null in its row 4"):
        read_all(path)


def test_c62_mixed_settings(tmp_path: Path) -> None:
    """Shards whose settings differ are refused."""
    write_rows(tmp_path / "a.parquet", one_layer(8, 2), rows_for([(0, 0, 0)], [[0, 1]]))
    write_rows(tmp_path / "b.parquet", one_layer(8, 2), rows_for([(1, 0, 0)], [[0, 1]]), device="another")
    with pytest.raises(TraceFormatError, match=r"b\.parquet: its settings differ from those of a\.parquet"):
        read_all(tmp_path)


def test_c63_slices_nulls_and_chunks() -> None:
    """A slice starts at its own row, a null keeps its place, and chunks follow each other."""
    kind = pa.list_(pa.float32(), 2)
    whole = pa.array([[1, 2], [3, 4], [5, 6]], kind)
    assert to_numpy("topk_weights", whole.slice(1)).tolist() == [[3, 4], [5, 6]]
    with_null = to_numpy("topk_weights", pa.array([[1, 2], None, [3, 4]], kind))
    np.testing.assert_array_equal(with_null, [[1, 2], [np.nan, np.nan], [3, 4]])
    sliced = to_numpy("topk_weights", pa.array([[9, 9], [1, 2], None, [3, 4]], kind).slice(1))
    np.testing.assert_array_equal(sliced, with_null)
    chunked = pa.chunked_array([whole.slice(2), whole.slice(0, 1), pa.array([], kind)])
    assert to_numpy("topk_weights", chunked).tolist() == [[5, 6], [1, 2]]
    rows = [np.array(pair, np.float16).tobytes() for pair in ([1, 2], [3, 4], [5, 6])]
    binary = pa.array([rows[0], None, rows[2]], pa.binary(4))
    np.testing.assert_array_equal(to_numpy("scores", binary.slice(1)), [[np.nan, np.nan], [5, 6]])
    phases = pa.chunked_array(
        [pa.array(words).dictionary_encode() for words in (["decode", "prefill"], ["prefill", "decode"])]
    )
    assert to_numpy("phase", phases.cast(pa.dictionary(pa.int32(), pa.string()))).tolist() == [True, False, False, True]
    with pytest.raises(ValueError, match="'topk_ids' is null in its row 1"):
        to_numpy("topk_ids", pa.array([[1, 2], None], pa.list_(pa.int16(), 2)))


def test_c63_null_rows_in_a_file(tmp_path: Path) -> None:
    """Null weights and lookahead rows between others stay in their places through a file."""
    weights = np.array([[1, 2], [np.nan, np.nan], [3, 4], [5, 6]], np.float32)
    rows = rows_for(
        [(0, position, 0) for position in range(4)], [[0, 1], [-1, -1], [2, 3], [4, 5]], topk_weights=weights
    )
    path = write_rows(tmp_path / "t.parquet", one_layer(8, 2), rows)
    assert pq.read_table(path)["topk_weights"].null_count == 1
    read = read_all(path, ("topk_weights",))[0]
    np.testing.assert_array_equal(read.topk_weights, weights[:, None])
    assert read.topk_ids[:, 0].tolist() == [[0, 1], [-1, -1], [2, 3], [4, 5]]


def test_c64c_interleaved_requests(tmp_path: Path) -> None:
    """Rows A0, B0, A1, B1 come back as request A and request B, whatever the row groups."""
    shape = one_layer(8, 1)
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]
    for group_rows in (1, 2, 4):
        path = tmp_path / f"{group_rows}.parquet"
        with TraceWriter(path, make_meta(shape), row_group_rows=group_rows) as writer:
            writer.write_rows(rows_for(keys, [[0], [1], [0], [1]]))
        assert [request.topk_ids[:, 0, 0].tolist() for request in read_all(path)] == [[0, 0], [1, 1]]
