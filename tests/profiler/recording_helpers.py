"""Record tiny models in a line: the recorder without files of models and prompts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moesim.trace import OPTIONAL_COLUMNS, RequestTrace, TraceReader, TraceWriter
from profiler.record.prompts import Request
from profiler.record.recording import Recorder, understand_model
from profiler.record.settings import RecordSettings
from tests.profiler.tiny_families import as_loaded, tiny_config

PROMPTS = ((11, 5, 93, 17, 42, 64, 8), (77, 3, 29, 54), (90, 61, 12, 7, 33))


def recorder_for(model: Any, family: str = "mixtral", **settings: Any) -> Recorder:
    """Give a recorder of a model that is in memory."""
    loaded = as_loaded(model, family)
    chosen = RecordSettings.of(**({"model": "none", "prompts": "none.txt", "out": "none"} | settings))
    return Recorder(loaded, chosen, understand_model(loaded, PROMPTS[0]))


def record_batches(recorder: Recorder, file: Path, *batches: Sequence[Request]) -> TraceReader:
    """Record some batches into one file and open it."""
    with TraceWriter(file, recorder.meta(), recorder.columns()) as writer:
        for batch in batches:
            recorder.record_batch(batch, writer, lambda _: None)
    return TraceReader(file)


def requests_of(reader: TraceReader) -> list[RequestTrace]:
    """Read all requests with all columns."""
    return list(reader.requests([name for name in OPTIONAL_COLUMNS if name in reader.columns]))


def save_config(folder: Path, family: str = "mixtral", **changes: Any) -> Path:
    """Write a tiny family's configuration for the command line."""
    file = folder / f"{family}.json"
    file.write_text(tiny_config(family, **changes).to_json_string(use_diff=False))
    return file


def save_prompts(folder: Path, entries: Sequence[dict[str, Any]]) -> Path:
    """Write prompts."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return file


def assert_equal(left: Sequence[RequestTrace], right: Sequence[RequestTrace]) -> None:
    """Compare requests bit for bit."""
    assert [entry.request for entry in left] == [entry.request for entry in right]
    for one, two in zip(left, right, strict=True):
        assert (one.domain, one.prompt_tokens) == (two.domain, two.prompt_tokens)
        for name in ("position", "step", "is_decode", "topk_ids", *OPTIONAL_COLUMNS):
            first, second = getattr(one, name), getattr(two, name)
            assert (first is None) == (second is None), name
            if first is not None:
                assert np.array_equal(first.view(np.uint8), second.view(np.uint8)), name
