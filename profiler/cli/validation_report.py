"""What ``moesim-profiler validate`` writes and prints."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from moesim.cli.output import plain
from moesim.files import write_text
from profiler.validate.figures import TERMS
from profiler.validate.grid import Configuration
from profiler.validate.summary import Error, Row, report_values, summarise

VALIDATION_VERSION = 1

_HEADINGS = (
    "configuration", "TPOT measured ms", "range", "predicted", "error %", "structure %", "drift %", "TTFT error %",
    *(f"{term} %" for term in TERMS), "copy %", "decisions", "same timing %",
)  # fmt: skip

# What a terminal has room for: heading, and heading of the same column of the page.
_SHOWN = (
    ("TPOT ms\nmeas.", "TPOT measured ms"), ("\npred.", "predicted"), ("error\n%", "error %"),
    ("struct.\n%", "structure %"), ("drift\n%", "drift %"), ("TTFT\nerr. %", "TTFT error %"),
    ("\ndecided", "decisions"),
)  # fmt: skip


def write_report(out: Path, head: Mapping[str, Any], configurations: Sequence[Configuration]) -> dict[str, Any]:
    """Write ``validation.json``, ``validation.md`` and the page of plots.

    Parameters
    ----------
    out : Path
        Folder.
    head : mapping
        What was run on what.
    configurations : sequence of Configuration
        What came out.

    Returns
    -------
    dict
        What the JSON holds.
    """
    # Imported here: torch and matplotlib side by side are slow to load, and errors of the settings come first.
    from moesim.plots import save_figure  # noqa: PLC0415
    from moesim.plots.validation import ComparedLatency, ComparedRun, draw_validation  # noqa: PLC0415

    rows = summarise(configurations)
    report = plain(
        {
            "validation_version": VALIDATION_VERSION,
            **head,
            "overall": report_values(rows),
            "configurations": [
                {**asdict(row), "settings": item.scenario.model_dump(mode="json", exclude={"name", "trace"}),
                 "repeats": [asdict(repeat) for repeat in item.repeats]}
                for row, item in zip(rows, configurations, strict=True)
            ],
        }
    )  # fmt: skip

    def latency(error: Error | None) -> ComparedLatency | None:
        names = ("measured_ns", "lowest_ns", "highest_ns", "predicted_ns")
        return None if error is None else ComparedLatency(**{name: getattr(error, name) for name in names})

    runs = [
        ComparedRun(row.name, latency(row.tpot), latency(row.ttft), row.terms, row.timing_frac, row.is_exact)
        for row in rows
    ]
    save_figure(draw_validation(runs, "; ".join(_setting_lines(report))), out / "validation")
    write_text(out / "validation.md", _markdown(report, rows))
    write_text(out / "validation.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
    return report


def _setting_lines(report: Mapping[str, Any]) -> list[str]:
    """Say what was run on what."""
    machine = report["machine"]
    files = f"{Path(report['scenario']).name}, {Path(report['model']).name}"
    mode = (
        f"compute paced to the scenario's durations (schedule moved when more than {report['largest_lag_ns'] / 1e6:g} "
        "ms late)"
        if report["paced"]
        else f"compute as fast as it is, predicted from {Path(report['device_file']).name}"
    )
    host = (
        f"{machine['device']}, {machine['n_cores']} cores, {machine['clock']}; {machine['runtime']}, Python "
        f"{machine['python']}, {machine['system']}; load {machine['load']:g}, {machine['measured_at']}"
    )
    return [
        f"{files}, {report['new_tokens']} new tokens, {mode}, {report['link']} link",
        f"{report['n_repeats']} interleaved repeats after a warm-up; medians and ranges",
        host,
    ]


def _summary_lines(report: Mapping[str, Any]) -> list[str]:
    """Say in words what the table comes to."""
    overall = report["overall"]
    same = "every decision is the replay's" if overall["is_exact"] else "DECISIONS DIFFER"
    timing = f"hits, late lookups and misses agree in at least {100 * overall['timing_frac']:.1f} % of the layer steps"
    lines = [f"{overall['n_configurations']} configurations: {same}; {timing}."]
    for name in ("tpot", "ttft"):
        parts = [
            f"{part} {100 * error['mean']:.2f} % mean, {100 * error['p50']:.2f} % p50, {100 * error['max']:.2f} % max"
            for part, error in overall[f"{name}_error"].items()
        ]
        if parts:
            lines.append(f"{name.upper()} error: {'; '.join(parts)}.")
    by_term = overall["tpot_error_by_term"]
    if by_term:
        terms = ", ".join(f"{term} {100 * error['mean']:.2f} %" for term, error in by_term.items())
        lines.append(
            f"By term, mean of the absolute error over measured TPOT: {terms}: {next(iter(by_term))} carries it."
        )
    if overall["copy_error"] is not None:
        lines.append(f"Time of one copy on the link: {100 * overall['copy_error']['mean']:.2f} % off in the mean.")
    tau = overall["kendall_tau"]
    ranked = f"Kendall tau {tau:.3f} over {overall['n_pairs']} pairs" if tau is not None else "no pair to rank"
    lines.append(f"Ranking by TPOT: {ranked}; {overall['n_ties']} pairs within the measured spread are left out.")
    if overall["overrun_ns"]:
        lag_ms = (report["largest_lag_ns"] or 0) / 1e6
        lines.append(
            f"What ended more than {lag_ms:g} ms late, stages, waits or copies, moved the schedule by "
            f"{overall['overrun_ns'] / 1e6:.1f} ms in all {overall['n_configurations'] * report['n_repeats']} runs."
        )
    return lines


def _cells(row: Row) -> list[str]:
    """Write one row of the table."""

    def percent(value: float | None, form: str = "+.2f") -> str:
        return "-" if value is None else f"{100 * value:{form}}"

    tpot = row.tpot
    ms = [] if tpot is None else [tpot.measured_ns / 1e6, tpot.lowest_ns / 1e6, tpot.highest_ns / 1e6]
    return [
        row.name,
        f"{ms[0]:.2f}" if ms else "-",
        f"{ms[1]:.2f} to {ms[2]:.2f}" if ms else "-",
        "-" if tpot is None else f"{tpot.predicted_ns / 1e6:.2f}",
        *(percent(None if tpot is None else getattr(tpot, part)) for part in ("total", "structure", "drift")),
        percent(None if row.ttft is None else row.ttft.total),
        *(percent(row.terms.get(term)) for term in TERMS),
        percent(row.copy),
        "equal" if row.is_exact else f"{sum(row.n_different.values())} differ",
        percent(row.timing_frac, ".1f"),
    ]


def _markdown(report: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Write the table as a page of the repository."""
    lines = ["# Executed against simulated", ""]
    lines += [f"* {line}" for line in _setting_lines(report)]
    lines += ["", *_summary_lines(report), "", *_term_lines(report["overall"]), ""]
    lines += [f"| {' | '.join(_HEADINGS)} |", f"|{'---|' * len(_HEADINGS)}"]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    lines += [
        "",
        "Errors are predicted minus measured over measured; those of terms are over the measured TPOT and add up to",
        "its error. Structure: what is left when the run's own stage times are fed back. Drift: the rest.",
    ]
    return "\n".join(lines) + "\n"


def _term_lines(overall: Mapping[str, Any]) -> list[str]:
    """Write the error of each term over all configurations as a table."""
    errors = dict(overall["tpot_error_by_term"])
    if overall["copy_error"] is not None:
        errors["copy, over its own time"] = overall["copy_error"]
    lines = ["| term, absolute error | mean % | p50 % | max % |", "|---|---|---|---|"]
    for term, error in errors.items():
        lines.append(f"| {term} | {' | '.join(f'{100 * error[part]:.2f}' for part in ('mean', 'p50', 'max'))} |")
    return lines


def view(report: Mapping[str, Any], configurations: Sequence[Configuration]) -> Group:
    """Lay the comparison out for reading.

    Parameters
    ----------
    report : mapping
        As `write_report` gives it.
    configurations : sequence of Configuration
        What came out.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Executed against simulated", title_justify="left")
    table.add_column("\nconfiguration", overflow="fold", min_width=16)
    for heading, _ in _SHOWN:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in summarise(configurations):
        cells = _cells(row)
        table.add_row(Text(cells[0]), *(Text(cells[_HEADINGS.index(name)]) for _, name in _SHOWN))
    return Group(table, *(Text(line) for line in (*_summary_lines(report), "", *_setting_lines(report))))
