"""Markdown tables of the results, and their place in the page."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Entry = Mapping[str, Any]
_MAIN_LINK = {"demand_first": "demand copies first", "fifo": "in the order of requests"}


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[int] = (0,)) -> str:
    """Write a table; columns are numbers, but for some."""
    rule = ["---" if column in texts else "---:" for column in range(len(headings))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows)) + "\n"


def _signed(value: float | None, decimals: int = 1, unit: str = "") -> str:
    """Write a difference with its sign; what rounds to nothing has none."""
    if value is None:
        return ""
    text = f"{value:+.{decimals}f}"
    return (text[1:] if float(text) == 0 else text) + unit


def _number(value: float | Sequence[float] | None, quantity: str | None) -> str:
    """Write a published or simulated value, or the two ends of a range."""
    if value is None:
        return "-"
    if not isinstance(value, int | float):
        low, high = (_number(end, quantity) for end in value)
        number, _, unit = high.partition(" ")
        return f"{low.partition(' ')[0]} to {number} {unit}"
    if quantity == "availability_percent":
        return f"{value:.3f} %" if value > 99.9 else f"{value:.2f} %"
    return _signed(value, 2, " %") if quantity == "change_percent" else f"{value:.1f} ms"


def comparison_table(rows: Sequence[Entry]) -> str:
    """Write every published number beside the simulated one, with numbered notes."""
    headings = ["number", "published", "simulated", "error", "all assumptions", "change: published", "simulated", "use"]
    notes: list[str] = []
    lines = []
    for row in rows:
        mark = ""
        if "note" in row:
            if row["note"] not in notes:
                notes.append(row["note"])
            mark = f" ({notes.index(row['note']) + 1})"
        quantity, simulated = row.get("quantity"), row.get("simulated")
        unit, span = (" %" if quantity == "tpot_ms" else " points"), ""
        if simulated is not None and row["high"] - row["low"] > 0.02:
            span = _number([row["low"], row["high"]], quantity)
        lines.append(
            [
                row["name"] + mark,
                _number(row.get("published"), quantity),
                _number(simulated, quantity),
                _signed(row.get("error"), 1, unit),
                span,
                _signed(row.get("published_change"), 1, " %"),
                _signed(row.get("simulated_change"), 1, " %"),
                row["use"],
            ]
        )
    listed = "".join(f"{number}. {note}\n" for number, note in enumerate(notes, start=1))
    return f"{_table(headings, lines, texts=(0, 7))}\n{listed}"


def contributions_table(results: Entry) -> str:
    """Write what each weaker policy and each use of the link adds to MoE-CORE's time."""
    headings = [
        "instead of MoE-CORE",
        "misses per token",
        "TPOT, ms",
        "own copies",
        "late copies",
        "queueing",
        "launches",
    ]
    lines = [
        [
            entry["scenario"],
            _signed(entry["extra_misses_per_token"]),
            _signed(entry["extra_ms"], 2),
            *(_signed(entry[f"extra_stall_{part}_ms"], 2) for part in ("demand", "late", "queue", "launch")),
        ]
        for entry in results["eviction"]["contributions"]
    ]
    return _table(headings, lines)


def eviction_table(results: Entry) -> str:
    """Write what weaker eviction costs on slower links."""
    names = ("LRU", "FIFO", "random")
    headings = ["link, GB/s", "load on demand, ms", "MoE-CORE, ms", *(f"{name}, ms" for name in names)]
    lines = [
        [
            f"{entry['gb_per_s']:g}",
            f"{entry['load_on_demand_ms']:.1f}",
            f"{entry['moe_core_ms']:.1f}",
            *(_signed(entry[f"{name}_extra_ms"], 2) for name in names),
        ]
        for entry in results["eviction_by_link"]
    ]
    return _table(headings, lines, texts=())


def crossings_table(results: Entry) -> str:
    """Write from which free link time on each depth of prefetching pays."""
    headings = ["waiting copies run", "limit", "experts ahead", "saves time from", "beats one less from", "saves, %"]
    limits = {"paper": "window", "fixed": "none"}

    def place(entry: Entry, key: str) -> str:
        if entry[key] is not None:
            return f"{entry[key]:.2f} copies"
        return "everywhere" if key == "pays_from_copies" and entry["least_saved_percent"] >= 0 else "-"

    lines = [
        [
            _MAIN_LINK[entry["discipline"]],
            limits[entry["rule"]],
            str(entry["depth"]),
            place(entry, "pays_from_copies"),
            place(entry, "beats_one_less_from_copies"),
            f"{_signed(entry['least_saved_percent'])} to {_signed(entry['most_saved_percent'])}",
        ]
        for entry in results["crossings"]
    ]
    return _table(headings, lines, texts=(0, 1))


def workloads_table(results: Entry) -> str:
    """Write what the other workloads' times would mean."""
    headings = [
        "workload",
        "load on demand, ms",
        "compute then, ms",
        "MoE-CORE then, ms",
        "published, ms",
        "availability for that",
    ]
    lines = [
        [
            entry["workload"],
            f"{entry['load_on_demand_ms']:.1f}",
            f"{entry['implied_compute_ms']:.1f}",
            f"{entry['simulated_moe_core_ms']:.1f}",
            f"{entry['moe_core_ms']:.1f}",
            f"{entry['implied_availability_percent']:.1f} %",
        ]
        for entry in results["workloads"]
    ]
    return _table(headings, lines)


def speculation_table(results: Entry) -> str:
    """Write the time of batch 2 with two drafts by chance of acceptance, one column for each assumption."""
    entries = results["speculation"]
    names = list(dict.fromkeys(entry["assumption"] for entry in entries))
    lines = []
    for acceptance in dict.fromkeys(entry["acceptance"] for entry in entries):
        row = {entry["assumption"]: entry for entry in entries if entry["acceptance"] == acceptance}
        tokens = f"{row[names[0]]['tokens_per_step']:.2f}"
        lines.append([f"{acceptance:.1f}", tokens, *(f"{row[name]['tpot_ms']:.1f}" for name in names)])
    return _table(["acceptance", "tokens a step", *names], lines, texts=())


def router_table(results: Entry) -> str:
    """Write statistics of the real traces beside those of the synthetic one."""
    targets, own = results["router"]["targets"], results["router"]["statistics"]
    fitted = results["router"]["settings"]
    jump = own["overlap_next_token"] / own["overlap_16_tokens_later"]
    lines = [
        ["Gini coefficient of the experts' popularity", f"{targets['gini']:.2f}", f"{own['gini']:.2f}", "gini"],
        [
            "overlap with the next token / with 16 tokens later",
            f"{targets['jump']:.2f}",
            f"{jump:.2f}",
            "lag_correlation",
        ],
        [
            "selected experts found by the lookahead",
            f"{targets['recall']:.2f}",
            f"{own['lookahead_recall']:.2f}",
            "lookahead_recall",
        ],
        [
            "16 hottest experts shared by two domains",
            f"{targets['shared_hottest']:.2f}",
            f"{own['shared_hottest']:.2f}",
            "domain_strength",
        ],
        [
            "availability, %",
            f"{100 * targets['available']:.2f}",
            f"{100 * results['router']['request']['value']:.2f}",
            "request_strength",
        ],
    ]
    rows = [[*line[:3], f"`{line[3]}` = {fitted[line[3]]:.3f}"] for line in lines]
    return _table(["statistic", "target", "synthetic", "set by"], rows, texts=(0, 3))


SECTIONS: dict[str, Callable[[Entry], str]] = {
    "comparison": lambda results: comparison_table(results["rows"]),
    "router": router_table,
    "contributions": contributions_table,
    "eviction": eviction_table,
    "crossings": crossings_table,
    "workloads": workloads_table,
    "speculation": speculation_table,
}


def all_tables(results: Entry) -> str:
    """Write all tables, each under its name."""
    return "\n".join(f"## {name}\n\n{write(results)}" for name, write in SECTIONS.items())


def with_tables(page: str, results: Entry) -> str:
    """Replace the tables between a page's markers.

    Parameters
    ----------
    page : str
        Markdown with ``<!-- name -->`` and ``<!-- end -->`` lines around each table.
    results : mapping
        The experiment's results.

    Raises
    ------
    ValueError
        If a table's markers are missing.
    """
    for name, write in SECTIONS.items():
        start, end = f"<!-- {name} -->\n", "<!-- end -->\n"
        before, found, rest = page.partition(start)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"the page has no lines '{start.strip()}' and '{end.strip()}' around a table")
        page = before + start + "\n" + write(results) + "\n" + end + after
    return page


def update_page(path: Path, results: Entry) -> None:
    """Rewrite the tables of a page in place."""
    path.write_text(with_tables(path.read_text(encoding="utf-8"), results), encoding="utf-8")
