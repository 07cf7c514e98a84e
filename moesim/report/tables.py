"""The table of a comparison, and the same as plain JSON values."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from moesim.metrics import SPLIT_PARTS, Spread
from moesim.report.entries import Entry, Floor, floors
from moesim.report.notes import has_wide_steps, notes, provenance_lines
from moesim.report.pairs import prefetch_effects
from moesim.units import ns_to_ms

REPORT_VERSION = 1

_MISSING = "-"
_WIDE, _BOUNDLESS = 105, 10_000
_LATENCY_TITLES = ("TPOT ms\nmean", "\np50", "\np95", "\np99", "TTFT\nms")
_TRAFFIC_TITLES = ("hit\n%", "late\n%", "misses\n/token", "MB\n/token", "link\n%")
_SPLIT_TITLES = ("\nstep", "\ncompute", "stall\ndemand", "\nlate", "\nqueue", "\nlaunch")


def _decimals(values_ns: Sequence[float | None]) -> int:
    """Choose how many decimals of a ms tell the values of a column apart."""
    largest = max((ns_to_ms(value) for value in values_ns if value is not None), default=0.0)
    return 2 if largest >= 10 else 3 if largest >= 1 else 4


def _ms(value_ns: float | None, decimals: int) -> str:
    """Write nanoseconds as ms."""
    return _MISSING if value_ns is None else f"{ns_to_ms(value_ns):.{decimals}f}"


def _percent(value: float | None) -> str:
    """Write a share in percent."""
    return _MISSING if value is None else f"{100 * value:.1f}"


def _number(value: float | None, scale: float = 1.0) -> str:
    """Write a plain number with one decimal."""
    return _MISSING if value is None else f"{value / scale:.1f}"


def _new_table(title: str, columns: Sequence[str], *, is_wide: bool) -> Table:
    """Start a table whose first column is a name and whose other columns are numbers."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1) if is_wide else (0, 0),
    )
    table.add_column("\nscenario", overflow="fold", min_width=12)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _spread_cells(spread: Spread, decimals: int) -> list[str]:
    """Write mean and percentiles."""
    return [_ms(value, decimals) for value in (spread.mean, spread.p50, spread.p95, spread.p99)]


def _has_throughput(entries: Sequence[Entry]) -> bool:
    """Whether tokens per second have a column."""
    return any(has_wide_steps(item.result.info) for item in entries)


def _latency_rows(entries: Sequence[Entry], bases: Sequence[Floor]) -> Iterator[tuple[str, str | None, list[str]]]:
    """Give name, style and cells of every run and floor: latencies, then rates and traffic."""
    has_throughput = _has_throughput(entries)
    decimals = _decimals([item.metrics.tpot_ns.p50 for item in entries])
    ttft_decimals = _decimals([item.metrics.ttft_ns.mean for item in entries])
    for item in entries:
        metrics = item.metrics
        cells = [
            *_spread_cells(metrics.tpot_ns, decimals),
            _ms(metrics.ttft_ns.mean, ttft_decimals),
            _percent(metrics.decode.hit_rate),
            _percent(metrics.decode.late_rate),
            _number(metrics.decode.misses_per_token),
            _number(metrics.decode_bytes_per_token, 1e6),
            _percent(metrics.link.use_frac),
            *[_number(metrics.decode_tokens_per_s)] * has_throughput,
        ]
        yield item.name, "italic" if item.role == "bound" else None, cells
    n_others = len(_LATENCY_TITLES) + len(_TRAFFIC_TITLES) + has_throughput - 4
    for base in bases:
        yield base.name, "italic", [*_spread_cells(base.tpot_ns, decimals), *[_MISSING] * n_others]


def _latency_tables(entries: Sequence[Entry], bases: Sequence[Floor], *, is_wide: bool) -> tuple[Table, Table, Table]:
    """Lay out latencies, rates and traffic: in one table, and in two for where one is too wide."""
    titles = (*_LATENCY_TITLES, *_TRAFFIC_TITLES, *["tokens\n/s"] * _has_throughput(entries))
    cut = len(_LATENCY_TITLES)
    whole = _new_table("Latency, hits and traffic", titles, is_wide=is_wide)
    latency = _new_table("Latency", titles[:cut], is_wide=is_wide)
    traffic = _new_table("Hits and traffic", titles[cut:], is_wide=is_wide)
    for name, style, cells in _latency_rows(entries, bases):
        whole.add_row(Text(name), *cells, style=style)
        latency.add_row(Text(name), *cells[:cut], style=style)
        if any(cell != _MISSING for cell in cells[cut:]):
            traffic.add_row(Text(name), *cells[cut:], style=style)
    return whole, latency, traffic


def _split_table(entries: Sequence[Entry], bases: Sequence[Floor], *, is_wide: bool) -> Table:
    """Lay out where the time of a decode step goes."""
    table = _new_table("Where the time of a decode step goes, ms (mean)", _SPLIT_TITLES, is_wide=is_wide)
    decimals = _decimals([item.metrics.itl_ns.mean for item in entries])
    for item in entries:
        means = item.metrics.split.mean_ns()
        parts = [_ms(means.get(name), decimals) for name in SPLIT_PARTS]
        style = "italic" if item.role == "bound" else None
        table.add_row(Text(item.name), _ms(item.metrics.itl_ns.mean, decimals), *parts, style=style)
    for base in bases:
        value = _ms(base.itl_ns, decimals)
        table.add_row(Text(base.name), value, value, *[_MISSING] * 4, style="italic")
    return table


class _Report:
    """Lays the tables out for the width at hand when it is printed."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Give the tables and the lines below them."""
        bases = floors(self._entries)
        is_wide = options.max_width >= _WIDE
        whole, *parts = _latency_tables(self._entries, bases, is_wide=is_wide)
        # A terminal cuts a line that is too long, and a number without its last digits is another number.
        needed = Measurement.get(console, options.update(max_width=_BOUNDLESS), whole).minimum
        yield from [whole] if needed <= options.max_width else parts
        yield _split_table(self._entries, bases, is_wide=is_wide)
        for line in (*provenance_lines(self._entries), *notes(self._entries)):
            yield Text(line)


def report_table(entries: Sequence[Entry]) -> RenderableType:
    """Lay a comparison out: one row per run, bounds and floors below, and what the numbers mean.

    Parameters
    ----------
    entries : sequence of Entry
        Runs in the order to show; bounds are moved below them.
    """
    return _Report(_ordered(entries))


def _ordered(entries: Sequence[Entry]) -> list[Entry]:
    """Put bounds behind runs, keeping the order within each."""
    return sorted(entries, key=lambda item: item.role == "bound")


def report_json(entries: Sequence[Entry]) -> dict[str, Any]:
    """Give a comparison as plain JSON values; times in ns, sizes in bytes, undefined values null.

    Parameters
    ----------
    entries : sequence of Entry
        As for `report_table`.
    """
    ordered = _ordered(entries)
    return {
        "report_version": REPORT_VERSION,
        "runs": [
            {
                "name": item.name,
                "role": item.role,
                "scenario_hash": item.result.scenario_hash,
                "settings": item.scenario.model_dump(mode="json") if item.scenario is not None else None,
                "info": item.result.info,
                "metrics": item.metrics.as_dict(),
            }
            for item in ordered
        ],
        "floors": [
            {
                "name": base.name,
                "of": list(base.of),
                "tpot_mean_ns": base.tpot_ns.mean,
                "tpot_p50_ns": base.tpot_ns.p50,
                "tpot_p95_ns": base.tpot_ns.p95,
                "tpot_p99_ns": base.tpot_ns.p99,
                "itl_mean_ns": base.itl_ns,
            }
            for base in floors(ordered)
        ],
        "prefetch_effects": [
            {"run": item.name, "without": twin.name, **asdict(effect)}
            for item, twin, effect in prefetch_effects(ordered)
        ],
        "provenance": provenance_lines(ordered),
        "notes": notes(ordered),
    }
