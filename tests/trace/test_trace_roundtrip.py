"""What is written is what is read."""

import dataclasses
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesim.errors import TraceFormatError, UnknownNameError
from moesim.trace import OPTIONAL_COLUMNS, ModelShape, RequestMeta, RequestTrace, TraceReader, TraceWriter
from moesim.trace.columns import bfloat16_bits, bfloat16_values
from moesim.trace.frame import to_pandas
from moesim.trace.schema import TraceMeta
from tests.trace.trace_helpers import assert_same, make_meta, make_request, read_all, rows_for, write_requests

SHAPE = ModelShape.uniform("toy", 3, 8, 2, hidden_size=4)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    """Models with uneven layers, identity experts and hash layers."""
    n_layers = draw(st.integers(1, 4))
    n_experts = tuple(draw(st.integers(1, 12)) for _ in range(n_layers))
    n_identity = draw(st.integers(0, 2))
    index = draw(st.integers(0, 3))
    return ModelShape(
        name="drawn",
        n_layers=n_layers,
        n_experts=n_experts,
        top_k=tuple(draw(st.integers(1, min(4, n + n_identity))) for n in n_experts),
        layer_index=tuple(range(index, index + n_layers)),
        routing=tuple(draw(st.sampled_from(["topk", "hash"])) for _ in range(n_layers)),
        hidden_size=draw(st.none() | st.integers(1, 3)),
        n_identity_experts=n_identity,
    )


@given(
    shape=shapes(),
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=4),
    group_rows=st.none() | st.integers(1, 20),
    seed=st.integers(0, 9),
    names=st.sets(st.sampled_from(OPTIONAL_COLUMNS)),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip(
    tmp_path: Path,
    shape: ModelShape,
    sizes: list[tuple[int, int]],
    group_rows: int | None,
    seed: int,
    names: set[str],
) -> None:
    """Any legal trace comes back bit for bit, whatever the shape, the columns and the row groups."""
    names = names - ({"hidden"} if shape.hidden_size is None else set())
    requests = [
        make_request(shape, number, n_prompt, n_decode, seed) for number, (n_prompt, n_decode) in enumerate(sizes)
    ]
    path = tmp_path / "trace.parquet"
    write_requests(path, shape, requests, columns=names, row_group_rows=group_rows)
    reader = TraceReader(path)
    wanted = [name for name in names if name in reader.columns]
    for written, read in zip(requests, reader.requests(wanted), strict=True):
        kept = {name: getattr(written, name) for name in RequestTrace.__slots__}
        kept |= {name: None for name in OPTIONAL_COLUMNS if name not in wanted}
        assert_same(RequestTrace(**kept), read)


def test_same_bytes(tmp_path: Path) -> None:
    """The same trace written twice gives the same bytes."""
    requests = [make_request(SHAPE, number) for number in range(3)]
    one = write_requests(tmp_path / "one.parquet", SHAPE, requests).read_bytes()
    assert one == write_requests(tmp_path / "two.parquet", SHAPE, requests).read_bytes()


def test_c60_second_pass(tmp_path: Path) -> None:
    """A second pass, and one while the first is under way, sees all ten requests."""
    path = write_requests(tmp_path / "t.parquet", SHAPE, [make_request(SHAPE, number) for number in range(10)])
    reader = TraceReader(path)
    first = reader.requests()
    assert next(first).request == 0
    assert [request.request for request in reader.requests()] == list(range(10))
    assert [request.request for request in first] == list(range(1, 10))
    assert len(list(reader.requests(["scores"]))) == 10


def test_c60_empty_trace(tmp_path: Path) -> None:
    """A trace without rows cannot be written, and nothing is left behind."""
    with pytest.raises(TraceFormatError, match="no rows"), TraceWriter(tmp_path / "t.parquet", make_meta(SHAPE)):
        pass
    assert list(tmp_path.iterdir()) == []


def test_writer_leaves_nothing_after_an_error(tmp_path: Path) -> None:
    """An error in the block removes the temporary file and keeps an older trace as it was."""
    path = write_requests(tmp_path / "t.parquet", SHAPE, [make_request(SHAPE)])
    before = path.read_bytes()

    def write_half() -> None:
        with TraceWriter(path, make_meta(SHAPE), row_group_rows=3) as writer:
            writer.write(make_request(SHAPE))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_half()
    assert [file.name for file in tmp_path.iterdir()] == ["t.parquet"]
    assert path.read_bytes() == before


def test_unfinished_shard_is_not_read(tmp_path: Path) -> None:
    """A shard that is still being written has a name that a folder's reader does not see."""
    write_requests(tmp_path / "a.parquet", SHAPE, [make_request(SHAPE, 0)])
    with TraceWriter(tmp_path / "b.parquet", make_meta(SHAPE), row_group_rows=3) as writer:
        writer.write(make_request(SHAPE, 1))
        assert [request.request for request in read_all(tmp_path)] == [0]
    assert [request.request for request in read_all(tmp_path)] == [0, 1]


def test_row_groups_are_cut_at_tokens(tmp_path: Path) -> None:
    """No token lies in two row groups, however the rows arrive."""
    path = tmp_path / "t.parquet"
    keys = [(0, position, layer) for position in range(7) for layer in range(3)]
    with TraceWriter(path, make_meta(SHAPE), row_group_rows=7) as writer:
        for start in range(0, len(keys), 5):
            part = keys[start : start + 5]
            writer.write_rows(rows_for(part, [[0, 1]] * len(part)))
    with pq.ParquetFile(path) as file:
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    assert sizes == [6, 6, 6, 3]
    assert read_all(path)[0].n_tokens == 7


def test_writer_adds_what_it_knows_of_requests(tmp_path: Path) -> None:
    """Descriptions given by hand and those of written requests end up in the metadata; contradictions are refused."""
    path = tmp_path / "t.parquet"
    with TraceWriter(path, make_meta(SHAPE)) as writer:
        writer.add_request(RequestMeta(request=1, domain="math", prompt_tokens=3))
        writer.write_rows(rows_for([(1, 3, layer) for layer in range(3)], [[0, 1]] * 3, n_prompt=3))
        with pytest.raises(TraceFormatError, match="described twice"):
            writer.add_request(RequestMeta(request=1, domain="code"))
    assert TraceReader(path).meta.requests == (RequestMeta(request=1, domain="math", prompt_tokens=3),)
    assert read_all(path)[0].domain == "math"


def test_requests_without_rows_are_refused(tmp_path: Path) -> None:
    """A described request that gets no rows is an error when the file is closed."""
    meta = make_meta(SHAPE, requests=(RequestMeta(request=7),))
    with pytest.raises(TraceFormatError, match=r"requests \[7\]"), TraceWriter(tmp_path / "t.parquet", meta) as writer:
        writer.write(make_request(SHAPE, 0))
    assert list(tmp_path.iterdir()) == []


def test_c16_scores_name_their_function(tmp_path: Path) -> None:
    """Scores above 1 are legal, and a file that has scores says which function made them."""
    request = make_request(SHAPE)
    scores = np.tile(np.array([1.4584, 1.1460, 0.8326, 0.5597, 0.5, 0.4, 0.3, 0.2], np.float16), (7, 3, 1))
    request = RequestTrace(
        **{name: getattr(request, name) for name in RequestTrace.__slots__ if name not in ("scores", "hidden")},
        scores=scores,
    )
    path = tmp_path / "t.parquet"
    unnamed = make_meta(SHAPE, score_kind=None)
    with pytest.raises(TraceFormatError, match="needs score_kind"), TraceWriter(path, unnamed) as writer:
        writer.write(request)
    with TraceWriter(path, make_meta(SHAPE, score_kind="sqrtsoftplus")) as writer:
        writer.write(request)
    meta = TraceReader(path).meta
    assert (meta.score_kind, meta.score_coverage) == ("sqrtsoftplus", "all")
    np.testing.assert_array_equal(read_all(path, ("scores",))[0].scores, scores)


def test_score_coverage_follows_the_columns(tmp_path: Path) -> None:
    """A file without scores does not claim any."""
    path = write_requests(tmp_path / "t.parquet", SHAPE, [make_request(SHAPE)], columns=["topk_weights"])
    assert TraceReader(path).meta.score_coverage is None


def test_c06_wide_ids(tmp_path: Path) -> None:
    """Ids 255, 256, 300, 511 and the hole -1 survive exactly."""
    shape = ModelShape.uniform("wide", 1, 512, 5)
    path = tmp_path / "t.parquet"
    with TraceWriter(path, make_meta(shape)) as writer:
        writer.write_rows(rows_for([(0, 0, 0)], [[255, 256, 300, 511, -1]]))
    assert read_all(path)[0].topk_ids.tolist() == [[[255, 256, 300, 511, -1]]]


def test_c06_wide_bytes(tmp_path: Path) -> None:
    """Sizes past 32 bits survive exactly."""
    n_bytes = 256 * 13_369_344
    path = tmp_path / "t.parquet"
    with TraceWriter(path, make_meta(SHAPE, expert_bytes=(n_bytes,) * 3)) as writer:
        writer.write(make_request(SHAPE))
    assert TraceReader(path).meta.expert_bytes == (3_422_552_064,) * 3


def test_identity_experts_are_legal(tmp_path: Path) -> None:
    """Ids past the real experts are legal up to the number of identity experts, and not beyond."""
    shape = SHAPE.model_copy(update={"n_identity_experts": 2})
    rows = [(0, 0, layer) for layer in range(3)]
    path = tmp_path / "t.parquet"
    with TraceWriter(path, make_meta(shape)) as writer:
        writer.write_rows(rows_for(rows, [[8, 9]] * 3))
    assert read_all(path)[0].topk_ids.max() == 9
    with pytest.raises(TraceFormatError, match="past the layer's last"), TraceWriter(path, make_meta(shape)) as writer:
        writer.write_rows(rows_for(rows, [[8, 10]] * 3))


def test_c64b_hidden_states_keep_their_range(tmp_path: Path) -> None:
    """Hidden states 65520, 70000 and 1e-8, which float16 loses, stay within bfloat16's rounding."""
    values = np.tile(np.array([65520, 70000, 1e-8, -3.5], np.float32), (7, 3, 1))
    request = make_request(SHAPE, with_all=False)
    request = RequestTrace(
        **{name: getattr(request, name) for name in RequestTrace.__slots__ if name != "hidden"},
        hidden=bfloat16_bits(values),
    )
    path = write_requests(tmp_path / "t.parquet", SHAPE, [request])
    hidden = read_all(path, ("hidden",))[0].hidden
    assert hidden is not None
    np.testing.assert_allclose(bfloat16_values(hidden), values, rtol=2**-8)
    with pytest.raises(ValueError, match="not finite"):
        bfloat16_bits(np.array([np.inf], np.float32))


def test_c64b_saturated_scores_fail_at_write(tmp_path: Path) -> None:
    """A score that overflowed to infinity in float16 is refused when it is written."""
    request = make_request(SHAPE)
    assert request.scores is not None
    scores = request.scores.astype(np.float32)
    scores[2, 1, 3] = 70000
    with np.errstate(over="ignore"):
        narrow = scores.astype(np.float16)
    broken = RequestTrace(
        **{name: getattr(request, name) for name in RequestTrace.__slots__ if name != "scores"}, scores=narrow
    )
    with pytest.raises(TraceFormatError, match="position 2, layer 1: scores has a NaN or an infinity"):
        write_requests(tmp_path / "t.parquet", SHAPE, [broken])


def test_columns_are_read_when_asked_for(tmp_path: Path) -> None:
    """Optional columns are None unless named; unknown and absent ones are refused by name."""
    path = write_requests(tmp_path / "t.parquet", SHAPE, [make_request(SHAPE)], columns=["scores", "topk_weights"])
    reader = TraceReader(path)
    request = next(reader.requests(["topk_weights", "topk_ids"]))
    assert request.scores is None
    assert request.topk_weights is not None
    with pytest.raises(UnknownNameError, match="'scores'"):
        reader.requests(["score"])
    with pytest.raises(TraceFormatError, match="has no 'lookahead'"):
        reader.requests(["lookahead"])


def test_arrays_are_read_only(tmp_path: Path) -> None:
    """Nobody can change a trace that others read."""
    request = read_all(write_requests(tmp_path / "t.parquet", SHAPE, [make_request(SHAPE)]), ("scores",))[0]
    with pytest.raises(ValueError, match="read-only"):
        request.topk_ids[0] = 0
    assert request.scores is not None
    assert not request.scores.flags.writeable


def test_reading_streams(tmp_path: Path) -> None:
    """Reading a trace with scores holds about one request and one row group, not the file."""
    shape = ModelShape.uniform("wide", 8, 256, 4)
    path = tmp_path / "t.parquet"
    request = make_request(shape, n_prompt=4, n_decode=60)
    with TraceWriter(path, make_meta(shape), columns=["scores"], row_group_rows=1024) as writer:
        for number in range(30):
            named = {name: getattr(request, name) for name in RequestTrace.__slots__} | {"request": number}
            writer.write(RequestTrace(**named))
    one = 64 * 8 * 256 * 2
    reader = TraceReader(path)
    arrow_before = pa.total_allocated_bytes()
    tracemalloc.start()
    in_arrow = [pa.total_allocated_bytes() - arrow_before for _ in reader.requests(["scores"])]
    in_numpy = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(in_arrow) == 30
    assert in_numpy < 8 * one
    assert max(in_arrow) < 8 * one


def test_to_pandas(tmp_path: Path) -> None:
    """The table has a row per token and layer and unpacks the wide columns asked for."""
    requests = [make_request(SHAPE, number) for number in range(2)]
    path = write_requests(tmp_path / "t.parquet", SHAPE, requests)
    frame = to_pandas(path, ["scores", "token_id"])
    assert len(frame) == 2 * 7 * 3
    row = frame[(frame.request == 1) & (frame.position == 4) & (frame.layer == 2)].iloc[0]
    assert row["phase"] == "decode"
    assert row["topk_ids_1"] == requests[1].topk_ids[4, 2, 1]
    assert requests[1].scores is not None
    assert row["scores_5"] == requests[1].scores[4, 2, 5]
    assert "topk_weights_1" in to_pandas(TraceReader(path)).columns


def test_meta_refuses_unknown_fields() -> None:
    """Settings that the schema does not know are refused, not dropped."""
    with pytest.raises(ValueError, match="extra"):
        TraceMeta.model_validate(make_meta(SHAPE).model_dump() | {"colour": "red"})


def test_wide_steps_are_known(tmp_path: Path) -> None:
    """A reader tells whether any decode step has several tokens, also where one of them opens another row group."""
    plain, wide = make_request(SHAPE, 0), make_request(SHAPE, 1)
    step = wide.step.copy()
    step[-1] = step[-2]
    wide = dataclasses.replace(wide, step=step)
    for name, requests, expected in (("plain", [plain], False), ("wide", [plain, wide], True)):
        path = write_requests(tmp_path / f"{name}.parquet", SHAPE, requests, row_group_rows=SHAPE.n_layers)
        assert TraceReader(path).has_wide_steps is expected
