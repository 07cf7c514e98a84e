"""The trace commands: one JSON object with --json, tables without, nothing else on stdout."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moesim.cli.trace import trace_app
from moesim.errors import ConfigError, TraceFormatError
from moesim.trace import ModelShape, TraceReader
from tests.trace.trace_helpers import make_request, rows_for, write_requests, write_rows

SHAPE = ModelShape.uniform("toy", 2, 8, 2)


def run(*words: str | Path, exit_code: int = 0) -> str:
    """Run a command and give its stdout."""
    # Wide enough that no message is folded, whatever the length of the temporary folder's name.
    runner = CliRunner(env={"COLUMNS": "600"})
    result = runner.invoke(trace_app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result.stdout


def run_json(*words: str | Path, exit_code: int = 0) -> dict[str, Any]:
    """Run a command with --json; stdout must be exactly one JSON object."""
    answer = json.loads(run(*words, "--json", exit_code=exit_code))
    assert isinstance(answer, dict)
    return answer


def test_info(tmp_path: Path) -> None:
    """Info says what the trace holds, as an object and as a table."""
    path = write_requests(tmp_path / "t.parquet", SHAPE, [make_request(SHAPE, number) for number in range(3)])
    answer = run_json("info", path)
    assert (answer["model"], answer["n_requests"], answer["n_rows"]) == ("toy", 3, 42)
    assert (answer["n_prefill_tokens"], answer["n_decode_tokens"]) == (9, 12)
    assert answer["domains"] == {"domain 0": 2, "domain 1": 1}
    assert len(answer["layers"]["gini"]) == 2
    assert answer["layers"]["overlap_lag_16"] == [None, None]
    text = run("info", path)
    assert "toy" in text
    assert "overlap at lag 1" in text
    assert " nan " not in text


def test_validate(tmp_path: Path) -> None:
    """A good trace ends with exit code 0, a bad one with 2 and its findings; lenient mode is an option."""
    path = write_requests(tmp_path / "t.parquet", SHAPE, [make_request(SHAPE)])
    assert run_json("validate", path)["is_valid"] is True
    assert "No findings." in run("validate", path)
    write_rows(path, SHAPE, rows_for([(0, 0, 0), (0, 0, 1)], [[1, 1], [2, 3]]))
    answer = run_json("validate", path, exit_code=2)
    assert [finding["level"] for finding in answer["findings"]] == ["error"]
    assert "named twice" in run("validate", path, exit_code=2)
    assert run_json("validate", path, "--lenient")["repairs"]["n_repeated_ids"] == 1


def test_synth(tmp_path: Path) -> None:
    """Options and --set reach the generator; what is written is reported."""
    path = tmp_path / "t.parquet"
    words = ["--requests", "2", "--prompt", "4", "--decode", "3-5", "--layers", "5", "--experts", "16", "--top-k", "2"]
    sets = ["--set", "gini=0.3", "--set", "domains=a,b", "--set", "lookahead_recall=none", "--score-kind", "sigmoid"]
    answer = run_json("synth", path, *words, *sets, "--seed", "4")
    assert (answer["n_requests"], answer["seed"]) == (2, 4)
    reader = TraceReader(path)
    assert reader.meta.score_kind == "sigmoid"
    assert [entry.domain for entry in reader.meta.requests] == ["a", "b"]
    assert "lookahead" not in reader.columns
    assert answer["n_bytes"] == path.stat().st_size
    assert "synthetic" in run("synth", path, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "few"], "--prompt: 'few'"),
        (["--set", "gini"], "'gini' is not NAME=VALUE"),
        (["--set", "colour=red"], "colour"),
        (["--top-k", "999"], "top_k = 999"),
    ],
)
def test_synth_with_wrong_options(tmp_path: Path, words: list[str], message: str) -> None:
    """A wrong option is an error of the package's own kind that names it."""
    with pytest.raises(ConfigError, match=message):
        run("synth", tmp_path / "t.parquet", *words)


def test_import(tmp_path: Path) -> None:
    """The format follows from the file's ending or an option; unknown endings and stray options are refused."""
    source = tmp_path / "route.csv"
    source.write_text(
        "# route_trace v1\n# model=/x/toy.gguf n_layer=1 n_expert=4 n_expert_used=1\n"
        "turn,phase,step,layer,slot,expert,weight\n0,1,0,0,0,3,1.0\n"
    )
    answer = run_json("import", source, tmp_path / "t.parquet", "--model", "toy-moe", "--licence", "MIT")
    assert (answer["model"], answer["n_rows"]) == ("toy-moe", 1)
    assert TraceReader(tmp_path / "t.parquet").meta.provenance.licence == "MIT"
    with pytest.raises(TraceFormatError, match=r"route\.csv: not a readable"):
        run("import", source, tmp_path / "t.parquet", "--format", "flat-lists")
    with pytest.raises(ConfigError, match="has no known ending"):
        run("import", tmp_path / "a.bin", tmp_path / "t.parquet")
    with pytest.raises(ConfigError, match="are for CSV files"):
        run("import", tmp_path / "a.parquet", tmp_path / "t.parquet", "--domain", "math")


def test_missing_trace(tmp_path: Path) -> None:
    """A path that does not exist is an error of the package's own kind."""
    with pytest.raises(TraceFormatError, match="no such file"):
        run("info", tmp_path / "gone.parquet")
