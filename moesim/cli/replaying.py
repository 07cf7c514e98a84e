"""What ``moesim replay`` does, apart from its options: load, run with a progress bar, print, write files."""

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moesim.bounds import bound_scenarios
from moesim.cli.output import check_writable, emit, progress_bar
from moesim.errors import ConfigError, UnknownNameError
from moesim.files import write_text
from moesim.report import Entry, Role, entry, report_json, report_table
from moesim.run import run_scenario, run_scenarios
from moesim.scenario import Scenario, load_scenarios, parse_override, to_toml
from moesim.timeline import write_timeline
from moesim.timeline.placement import ExpertsOrder


@dataclass(frozen=True, slots=True)
class Request:
    """The options of one call.

    Attributes
    ----------
    paths : tuple of Path
        Scenario files.
    settings : tuple of str
        Overrides as ``KEY=VALUE``.
    backend : str or None
        Replaces the scenarios' own.
    out : Path or None
        Folder to write to.
    as_json, with_plots, with_timeline, with_bound : bool
        Switches.
    timeline_of : str or None
        Scenario that the timeline shows; the last one by default.
    limit : int or None
        At most this many requests.
    """

    paths: tuple[Path, ...]
    settings: tuple[str, ...]
    backend: str | None
    out: Path | None
    as_json: bool
    with_plots: bool
    with_timeline: bool
    timeline_of: str | None
    limit: int | None
    with_bound: bool


def answer(request: Request) -> None:
    """Run what was asked for, print it, and write files when a folder was given.

    Raises
    ------
    MoesimError
        If a scenario is wrong or cannot be served.
    OSError
        If the folder cannot be written to.
    """
    scenarios = _load(request)
    shown = _timeline_scenario(request, scenarios)
    if request.out is not None:
        # A folder that cannot be made should stop the call before the runs, not after.
        check_writable(request.out, "--out", is_folder=True)
    bounds = bound_scenarios(scenarios) if request.with_bound else ()
    entries = _run_all(scenarios, bounds)
    if request.out is not None:
        request.out.mkdir(parents=True, exist_ok=True)
        _write(request.out, entries, with_plots=request.with_plots)
        if shown is not None:
            _write_timeline(request.out / "timeline.json", shown)
    emit(report_json(entries), request.as_json, report_table(entries))
    if request.out is not None and not request.as_json:
        for line in _guide(request.out, shown, with_plots=request.with_plots):
            print(line, file=sys.stderr)


def _guide(out: Path, shown: Scenario | None, *, with_plots: bool) -> list[str]:
    """Say which files were written and what to do with them."""
    lines = [f"Written to {out}:"]
    if with_plots and (out / "tpot_breakdown.png").exists():
        lines.append("  tpot_breakdown.png, layer_hit_rate.png: a step's time, hit rate by layer (also as .svg)")
    if shown is not None:
        what = "first request" if shown.decode.batch == 1 else "first batch"
        lines.append(f"  timeline.json: {what} of {shown.name!r}; open it at https://ui.perfetto.dev")
    lines.append("  summary.json: every number above, and more")
    lines.append("  one folder per run: its columns as Parquet, its settings in scenario.toml")
    return lines


def _load(request: Request) -> tuple[Scenario, ...]:
    """Read all scenarios with the overrides of the command line."""
    overrides = dict(map(parse_override, request.settings))
    if request.backend is not None:
        overrides["backend"] = request.backend
    if request.limit is not None:
        overrides["requests.limit"] = request.limit
    scenarios = tuple(scenario for path in request.paths for scenario in load_scenarios(path, overrides))
    twice = [name for name, count in Counter(scenario.name for scenario in scenarios).items() if count > 1]
    if twice:
        raise ConfigError(f"scenarios must have different names, but {twice[0]!r} occurs more than once: set `name`")
    return scenarios


def _timeline_scenario(request: Request, scenarios: Sequence[Scenario]) -> Scenario | None:
    """Choose the scenario of the timeline, None when there will be none."""
    names = [scenario.name for scenario in scenarios]
    if request.timeline_of is not None and request.timeline_of not in names:
        raise UnknownNameError.nearest("scenario (--timeline-of)", request.timeline_of, names)
    if request.out is None or not request.with_timeline:
        return None
    return scenarios[-1 if request.timeline_of is None else names.index(request.timeline_of)]


def _run_all(scenarios: Sequence[Scenario], bounds: Sequence[Scenario]) -> list[Entry]:
    """Run everything, showing on standard error how far it is."""
    roles: list[tuple[Role, Scenario]] = [("run", item) for item in scenarios] + [("bound", item) for item in bounds]
    with progress_bar("replaying") as advance:
        results = run_scenarios([scenario for _, scenario in roles], progress=advance)
    return [entry(result, role, scenario) for result, (role, scenario) in zip(results, roles, strict=True)]


def _folder_names(names: Sequence[str]) -> list[str]:
    """Turn names into folder names: safe characters, and different even where case does not count."""
    folders: list[str] = []
    taken: set[str] = set()
    for name in names:
        base = re.sub(r"[^A-Za-z0-9._+-]+", "_", name).strip("._") or "run"
        folder, number = base, 1
        while folder.casefold() in taken:
            number += 1
            folder = f"{base}-{number}"
        taken.add(folder.casefold())
        folders.append(folder)
    return folders


def _write(out: Path, entries: Sequence[Entry], *, with_plots: bool) -> None:
    """Write columns, settings, summary and plots."""
    for item, folder in zip(entries, _folder_names([item.name for item in entries]), strict=True):
        item.result.save(out / folder)
        if item.scenario is not None:
            write_text(out / folder / "scenario.toml", to_toml(item.scenario))
    write_text(out / "summary.json", json.dumps(report_json(entries), indent=2, allow_nan=False) + "\n")
    if with_plots:
        _write_plots(out, entries)


def _write_plots(out: Path, entries: Sequence[Entry]) -> None:
    """Draw every picture that the runs have numbers for."""
    # Imported here: a call without plots need not wait for matplotlib.
    from moesim.plots import draw_layer_hit_rate, draw_tpot_breakdown, save_figure  # noqa: PLC0415

    runs = [(item.name, item.metrics) for item in entries if item.role == "run"]
    bounds = [(item.name, item.metrics) for item in entries if item.role == "bound"]
    if any(metrics.split.n_steps for _, metrics in runs):
        save_figure(draw_tpot_breakdown(runs, bounds), out / "tpot_breakdown")
    # A run without slots has a line at 0, which would press the others together.
    kept = [item for item in entries if item.metrics.decode.n_lookups]
    kept = [item for item in kept if item.result.info.get("slots") != 0] or kept
    if any(item.role == "run" for item in kept):
        # Where the link is narrow, what an oracle copies ahead is late, not hit: its hit rate bounds nothing.
        plain = [item for item in kept if item.role == "bound" and item.result.info.get("predictor", "none") == "none"]
        figure = draw_layer_hit_rate(
            [(item.name, item.metrics) for item in kept if item.role == "run"],
            [(item.name, item.metrics) for item in plain],
            kinds={item.name: _kind(item) for item in kept},
        )
        save_figure(figure, out / "layer_hit_rate")


def _kind(item: Entry) -> tuple[str, str]:
    """Name a run's policies and its cache, for what pictures show by colour and by line style."""
    info = item.result.info
    settings = item.scenario.model_dump_json(include={"eviction", "prefetch", "score_source"}) if item.scenario else ""
    return settings, f"{info.get('slots')} {info.get('pool_bytes')}"


def _write_timeline(path: Path, scenario: Scenario) -> None:
    """Run the first request of a scenario, or its first batch, once more, in detail, and lay it out."""
    n_requests = min(scenario.decode.batch, scenario.requests.limit or scenario.decode.batch)
    result = run_scenario(scenario.with_settings({"requests.limit": n_requests}), detail=True)
    order: ExpertsOrder = scenario.compute.experts if scenario.link.asynchronous else "blocking"
    write_timeline(result, path, experts=order)
