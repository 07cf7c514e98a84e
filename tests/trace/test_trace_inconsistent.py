"""Files whose footer, columns, steps or layers contradict themselves are refused by name."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moesim.errors import TraceFormatError
from moesim.trace import ModelShape, TraceReader
from tests.trace.trace_helpers import footer_of, make_request, read_all, rewrite, rows_for, write_requests, write_rows

SHAPE = ModelShape.uniform("toy", 3, 8, 2, hidden_size=4)

Change = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content | {"schema_version": 2}, "schema version 2 is newer"),
        (lambda content: content | {"kind": "counts"}, "is of kind 'counts'"),
        (lambda content: content | {"n_rows": 22}, "holds 21 rows, its metadata says 22"),
        (lambda content: content | {"config_hash": "0" * 64}, "config hash"),
        (lambda content: content | {"colour": "red"}, "metadata field 'colour'"),
        (lambda content: content | {"model": content["model"] | {"n_layers": 4}}, "metadata field 'model'"),
        (lambda content: {name: value for name, value in content.items() if name != "checksums"}, "lacks"),
    ],
)
def test_footers_that_lie(tmp_path: Path, change: Change, message: str) -> None:
    """Newer, foreign and inconsistent metadata is refused with the file's name and the reason."""
    path = write_requests(tmp_path / "t.parquet", SHAPE, [make_request(SHAPE)])
    rewrite(path, change_footer=change)
    with pytest.raises(TraceFormatError, match=f"t.parquet: .*{message}"):
        TraceReader(path)


def test_changed_metadata_is_noticed(tmp_path: Path) -> None:
    """Metadata that differs from its own digest is refused."""
    path = write_requests(tmp_path / "t.parquet", SHAPE, [make_request(SHAPE)])
    content = json.dumps(footer_of(path) | {"digest": "0" * 64}).encode()
    pq.write_table(pq.read_table(path).replace_schema_metadata({b"moesim": content}), path)
    with pytest.raises(TraceFormatError, match="differs from its own digest"):
        TraceReader(path)


def test_changed_values_are_noticed(tmp_path: Path) -> None:
    """Values that differ from the checksums in the footer are refused, though every page checksum is right."""
    path = write_requests(tmp_path / "t.parquet", SHAPE, [make_request(SHAPE)])

    def other_ids(table: pa.Table) -> pa.Table:
        return table.set_column(
            5, table.schema.field(5), table["topk_ids"].combine_chunks().take(list(range(20, -1, -1)))
        )

    rewrite(path, other_ids)
    with pytest.raises(TraceFormatError, match="'topk_ids' of row group 0 differs from its checksum"):
        read_all(path)


def test_foreign_files(tmp_path: Path) -> None:
    """A file of another kind, a missing file and an empty folder are refused by name."""
    pq.write_table(pa.table({"a": [1]}), tmp_path / "foreign.parquet")
    with pytest.raises(TraceFormatError, match=r"foreign\.parquet: no 'moesim' metadata"):
        TraceReader(tmp_path / "foreign.parquet")
    with pytest.raises(TraceFormatError, match=r"gone\.parquet: no such file or folder"):
        TraceReader(tmp_path / "gone.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceFormatError, match=r"holds no \.parquet file"):
        TraceReader(tmp_path / "empty")


def test_wrong_types(tmp_path: Path) -> None:
    """A column of another type or width is refused by name."""
    path = write_requests(tmp_path / "t.parquet", SHAPE, [make_request(SHAPE)])
    rewrite(path, lambda table: table.set_column(4, "layer", table["layer"].cast(pa.int32())))
    with pytest.raises(TraceFormatError, match="'layer' has type int32"):
        TraceReader(path)
    path = write_requests(tmp_path / "t.parquet", SHAPE, [make_request(SHAPE)])
    rewrite(path, lambda table: table.append_column("colour", table["position"]))
    with pytest.raises(TraceFormatError, match="'colour'"):
        TraceReader(path)


@pytest.mark.parametrize(
    ("steps", "decode", "message"),
    [
        ([1, 0], [True, True], "position 1, layer 0: step falls"),
        ([0, 1], [True, False], "position 1, layer 0: prefill follows decode"),
        ([1, 1], [False, True], "position 1, layer 0: one step holds prefill and decode"),
        ([-1, 0], [True, True], "step -1 is negative"),
    ],
)
def test_steps_and_phases(tmp_path: Path, steps: list[int], decode: list[bool], message: str) -> None:
    """Steps never fall, decode never goes back to prefill, and a step has one phase."""
    rows = rows_for([(0, 0, 0), (0, 1, 0)], [[0, 1]] * 2)
    arrays = rows.arrays() | {"step": np.array(steps, np.int32), "is_decode": np.array(decode)}
    path = write_rows(tmp_path / "t.parquet", ModelShape.uniform("one", 1, 8, 2), type(rows)(**arrays))
    with pytest.raises(TraceFormatError, match=message):
        read_all(path)


def test_layers_of_a_token_agree(tmp_path: Path) -> None:
    """A token whose layers differ in step is refused."""
    rows = rows_for([(0, 0, layer) for layer in range(3)], [[0, 1]] * 3)
    arrays = rows.arrays() | {"step": np.array([1, 1, 2], np.int32)}
    path = write_rows(tmp_path / "t.parquet", SHAPE, type(rows)(**arrays))
    with pytest.raises(TraceFormatError, match="layer 2: step differs"):
        read_all(path)


def test_layers_past_the_last(tmp_path: Path) -> None:
    """A layer that the model does not have is refused where keys are first read."""
    path = write_rows(tmp_path / "t.parquet", SHAPE, rows_for([(0, 0, 3)], [[0, 1]]))
    with pytest.raises(TraceFormatError, match=re.escape("request 0, position 0, layer 3: layer is out of range")):
        read_all(path)


def test_per_layer_top_k(tmp_path: Path) -> None:
    """Ids beyond a layer's own k are refused, below it they are padding."""
    shape = SHAPE.model_copy(update={"top_k": (2, 1, 2)})
    path = write_rows(tmp_path / "t.parquet", shape, rows_for([(0, 0, layer) for layer in range(3)], [[0, 1]] * 3))
    with pytest.raises(TraceFormatError, match="layer 1: more ids than the layer's top_k"):
        read_all(path)
