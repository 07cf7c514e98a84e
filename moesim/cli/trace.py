"""`moesim trace`: look at traces, check them, make synthetic ones, import foreign ones."""

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table

from moesim.cli.output import check_writable, emit, key_values, print_error, progress_bar
from moesim.cli.trace_stats import stats
from moesim.errors import ConfigError
from moesim.trace import RequestTrace, TraceMeta, TraceReader
from moesim.trace.importers.bigmoeonedge_csv import import_bigmoeonedge_csv
from moesim.trace.importers.flat_lists import import_flat_lists
from moesim.trace.stats import expert_counts, gini, lag_overlap
from moesim.trace.synth import SynthSettings, synthesize
from moesim.trace.validate import Report, validate_trace

trace_app = typer.Typer(
    help="Look at, check, synthesise and import router traces.", no_args_is_help=True, rich_markup_mode=None
)
trace_app.command()(stats)

AsJson = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")]
TracePath = Annotated[Path, typer.Argument(help="Trace file, or a folder of shards.")]
Lenient = Annotated[
    bool, typer.Option("--lenient", help="Repair and count what can be repaired, instead of refusing it.")
]


@trace_app.command()
def info(path: TracePath, lenient: Lenient = False, as_json: AsJson = False) -> None:
    """Say what a trace holds: model, requests, tokens, columns, provenance, and how its routing behaves."""
    reader = TraceReader(path, strict=not lenient)
    requests: list[RequestTrace] = []
    with progress_bar("reading") as progress:
        for request in reader.requests():
            requests.append(request)
            progress(len(requests), len(reader.request_numbers))
    emit(*_info(reader, requests, as_json))


def _info(reader: TraceReader, requests: list[RequestTrace], as_json: bool) -> tuple[dict[str, Any], bool, Group]:
    meta, shape = reader.meta, reader.meta.model
    counts = expert_counts(requests, shape)
    overlap = lag_overlap(requests, shape, (1, 16), "decode")
    n_decode = sum(request.n_decode_tokens for request in requests)
    domains: dict[str, int] = {}
    for request in requests:
        domains[request.domain or "-"] = domains.get(request.domain or "-", 0) + 1
    answer: dict[str, Any] = {
        "path": str(reader.path),
        "n_files": len(reader.files),
        "model": shape.name,
        "n_layers": shape.n_layers,
        "n_experts": sorted(set(shape.n_experts)),
        "top_k": sorted(set(shape.top_k)),
        "n_hash_layers": shape.routing.count("hash"),
        "n_requests": len(requests),
        "n_rows": reader.n_rows,
        "n_prefill_tokens": sum(request.n_tokens for request in requests) - n_decode,
        "n_decode_tokens": n_decode,
        "columns": sorted(reader.columns),
        "score_kind": meta.score_kind,
        "weights_kind": meta.weights_kind,
        "lookahead_source": meta.lookahead_source,
        "domains": domains,
        "provenance": meta.provenance.model_dump(mode="json"),
        "layers": {
            "layer_index": list(shape.layer_index),
            "gini": gini(counts),
            "overlap_lag_1": overlap[:, 0],
            "overlap_lag_16": overlap[:, 1],
        },
    }
    flat = {key: value for key, value in answer.items() if not isinstance(value, dict)}
    flat["domains"] = [f"{name} ({number})" for name, number in domains.items()]
    flat |= {f"provenance_{key}": value for key, value in answer["provenance"].items() if value}
    table = Table(title="Layers", title_justify="left")
    for heading in ("layer", "model layer", "Gini", "overlap at lag 1", "overlap at lag 16"):
        table.add_column(heading, justify="right")
    columns = (shape.layer_index, answer["layers"]["gini"], overlap[:, 0], overlap[:, 1])
    for layer, (index, popularity, near, far) in enumerate(zip(*columns, strict=True)):
        cells = ("-" if math.isnan(value) else f"{value:.2f}" for value in (popularity, near, far))
        table.add_row(str(layer), str(index), *cells)
    return answer, as_json, Group(key_values(flat), table)


@trace_app.command()
def validate(path: TracePath, lenient: Lenient = False, as_json: AsJson = False) -> None:
    """Check every value of a trace; exit code 2 if it breaks a law of the schema."""
    with progress_bar("checking") as progress:
        report = validate_trace(path, strict=not lenient, progress=progress)
    emit(report.to_json(), as_json, _report_view(report))
    errors = [finding.message for finding in report.findings if finding.level == "error"]
    if errors:
        more = f" (and {len(errors) - 1} more, listed above)" if len(errors) > 1 else ""
        where = "" if errors[0].startswith(str(path)) else f"{path}: "
        print_error(f"{where}{errors[0]}{more}")
        raise typer.Exit(2)


def _report_view(report: Report) -> Group:
    flat = {key: value for key, value in report.to_json().items() if key not in ("repairs", "findings")}
    flat |= {key: value for key, value in report.to_json()["repairs"].items() if value}
    table = Table(title="Findings", title_justify="left")
    for heading in ("level", "code", "message"):
        table.add_column(heading, overflow="fold")
    for finding in report.findings:
        table.add_row(finding.level, finding.code, finding.message)
    return Group(key_values(flat), table if report.findings else "No findings.")


def _range(text: str, name: str) -> tuple[int, int]:
    """Read "64" or "32-128"."""
    low, _, high = text.partition("-")
    try:
        return int(low), int(high or low)
    except ValueError:
        raise ConfigError(f"{name}: {text!r} is neither a number nor a range; write e.g. 64 or 32-128") from None


@trace_app.command()
def synth(
    output: Annotated[Path, typer.Argument(help="Trace file to write.")],
    requests: Annotated[int | None, typer.Option(help="Number of requests.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Prompt tokens, e.g. 64 or 32-128.")] = None,
    decode: Annotated[str | None, typer.Option(help="Decode steps, e.g. 128 or 100-200.")] = None,
    layers: Annotated[int | None, typer.Option(help="MoE layers.")] = None,
    experts: Annotated[int | None, typer.Option(help="Routed experts of a layer.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts of a token.")] = None,
    score_kind: Annotated[str | None, typer.Option(help="softmax, sigmoid, sqrtsoftplus or logit.")] = None,
    seed: Annotated[int, typer.Option(help="Equal settings and seed give equal bytes.")] = 0,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting as NAME=VALUE, e.g. gini=0.3 or domains=code,math."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a synthetic trace with all-expert scores and lookahead."""
    check_writable(output, "output", is_folder=False)
    given: dict[str, Any] = {
        "n_requests": requests,
        "prompt_tokens": None if prompt is None else _range(prompt, "--prompt"),
        "decode_tokens": None if decode is None else _range(decode, "--decode"),
        "n_layers": layers,
        "n_experts": experts,
        "top_k": top_k,
        "score_kind": score_kind,
        "seed": seed,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    for pair in setting or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set: {pair!r} is not NAME=VALUE; write e.g. --set gini=0.3")
        settings[name] = _value(name, value)
    with progress_bar("synthesising") as progress:
        meta = synthesize(output, SynthSettings.of(**settings), progress)
    emit(*_written(output, meta, as_json))


def _value(name: str, text: str) -> Any:
    if name in ("prompt_tokens", "decode_tokens"):
        return _range(text, name)
    if name == "domains":
        return tuple(text.split(","))
    return None if text == "none" else text


def _written(path: Path, meta: TraceMeta, as_json: bool) -> tuple[dict[str, Any], bool]:
    reader = TraceReader(path)
    answer = {
        "path": str(path),
        "model": meta.model.name,
        "n_requests": len(reader.meta.requests),
        "n_rows": reader.n_rows,
        "n_bytes": path.stat().st_size,
        "columns": sorted(reader.columns),
        "seed": meta.provenance.seed,
        "source": meta.provenance.source,
    }
    return answer, as_json


class Format(StrEnum):
    """Foreign formats that can be imported."""

    flat_lists = "flat-lists"
    bigmoeonedge_csv = "bigmoeonedge-csv"


@trace_app.command(name="import")
def import_(
    source: Annotated[Path, typer.Argument(help="File to convert.")],
    output: Annotated[Path, typer.Argument(help="Trace file to write.")],
    file_format: Annotated[
        Format | None, typer.Option("--format", help="Left out: flat-lists for .parquet, bigmoeonedge-csv for .csv.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model, where the file has none (CSV only).")] = None,
    origin: Annotated[str | None, typer.Option(help="Where the file is from (CSV only).")] = None,
    licence: Annotated[str | None, typer.Option(help="Licence of the data, if the file does not state it.")] = None,
    domain: Annotated[str | None, typer.Option(help="Domain of the requests (CSV only).")] = None,
    as_json: AsJson = False,
) -> None:
    """Convert another tool's trace."""
    check_writable(output, "output", is_folder=False)
    if file_format is None:
        guesses = {".parquet": Format.flat_lists, ".csv": Format.bigmoeonedge_csv}
        file_format = guesses.get(source.suffix)
        if file_format is None:
            raise ConfigError(f"--format: {source.name!r} has no known ending; choose {' or '.join(Format)}")
    if file_format is Format.flat_lists:
        if any(value is not None for value in (model, origin, domain)):
            raise ConfigError("--model, --origin and --domain are for CSV files; a flat-list file states them itself")
        meta = import_flat_lists(source, output, licence=licence)
    else:
        meta = import_bigmoeonedge_csv(
            source, output, model=model, origin=origin, licence=licence or "not stated", domain=domain
        )
    emit(*_written(output, meta, as_json))
