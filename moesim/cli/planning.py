"""What ``moesim plan`` does: settle each scenario, and lay its memory plan out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from moesim.cli.output import emit
from moesim.errors import ConfigError, UnknownNameError
from moesim.memory import LONGEST_CONTEXT, MemoryPlan
from moesim.scenario import Scenario, load_scenarios, parse_override
from moesim.units import format_bytes
from moesim.workload import Resolved, resolve


def chosen_scenarios(path: Path, settings: Sequence[str], variant: str | None) -> tuple[Scenario, ...]:
    """Read a scenario file with overrides and pick one variant, or all.

    Raises
    ------
    MoesimError
        If a setting is wrong, or the variant does not exist.
    """
    scenarios = load_scenarios(path, dict(map(parse_override, settings)))
    names = [scenario.name for scenario in scenarios]
    if variant is None:
        return scenarios
    if variant not in names:
        raise UnknownNameError.nearest(f"variant of {path}", variant, names)
    return (scenarios[names.index(variant)],)


def print_plans(path: Path, settings: Sequence[str], variant: str | None, as_json: bool) -> None:
    """Print the memory plan of every scenario of a file.

    Raises
    ------
    MoesimError
        If a scenario has no ``[memory]`` table, or does not fit it.
    """
    answers: list[dict[str, Any]] = []
    tables: list[Table | Text] = []
    for scenario in chosen_scenarios(path, settings, variant):
        if scenario.memory is None:
            raise ConfigError(
                f"scenario {scenario.name!r} has no [memory] table to plan by: add one, or give "
                "--set memory.context_tokens=8192"
            )
        resolved = resolve(scenario)
        assert resolved.memory is not None
        answers.append(_answer(resolved, resolved.memory))
        tables += [_table(resolved, resolved.memory), Text(_summary(resolved, resolved.memory))]
    emit({"plans": answers}, as_json, Group(*tables))


def _answer(resolved: Resolved, plan: MemoryPlan) -> dict[str, Any]:
    """Give a plan as JSON values."""
    info = resolved.info()
    return {
        "scenario": resolved.scenario.name,
        "model": info["model"],
        "device": info["device"],
        "slots": info["slots"],
        "pool_bytes": info["pool_bytes"],
        **plan.as_dict(),
        "notes": info["notes"],
    }


def _table(resolved: Resolved, plan: MemoryPlan) -> Table:
    """Lay the parts out, largest meaning first: what stays, what a request takes, what is left."""
    budget = plan.budget
    explained = {
        "resident_bytes": ("weights that stay", "all but routed experts"),
        "kv_bytes": ("key-value cache", f"{budget.n_requests} x {budget.context_tokens:,} tokens"),
        "staging_bytes": ("staging buffers", f"{budget.n_staging_buffers} x the largest layer"),
        "transient_bytes": ("transient buffer", "one step's experts of one layer"),
        "reserve_bytes": ("reserve", "driver, activations, fragmentation"),
        "slot_bytes": ("expert slots", _slots_text(resolved)),
        "free_bytes": ("free", ""),
    }
    table = Table(title=f"{resolved.scenario.name}: {plan.model.name}", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("part", "bytes", "size", "share", "what"):
        table.add_column(heading, justify="right" if heading in {"bytes", "size", "share"} else "left", overflow="fold")
    for key, n_bytes in plan.parts().items():
        name, what = explained[key]
        table.add_row(name, f"{n_bytes:,}", format_bytes(n_bytes), f"{n_bytes / budget.device_bytes:.1%}", Text(what))
    table.add_section()
    table.add_row("device", f"{budget.device_bytes:,}", format_bytes(budget.device_bytes), "", budget.device_source)
    return table


def _slots_text(resolved: Resolved) -> str:
    """Say how many slots there are."""
    if resolved.pool_bytes >= 0:
        return "one pool over all layers"
    slots = resolved.capacity
    if slots.min() == slots.max():
        return f"{int(slots[0])} in each of {len(slots)} layers"
    return f"{int(slots.min())} to {int(slots.max())} in {len(slots)} layers, {int(slots.sum())} in all"


def _summary(resolved: Resolved, plan: MemoryPlan) -> str:
    """Say what would fit at most."""
    context = plan.context_that_fits(plan.slot_bytes)
    longest = "any length" if context == LONGEST_CONTEXT else f"{context or 0:,} tokens"
    lines = [
        f"Most slots per layer that fit: {plan.n_slots_that_fit}. Longest context beside these slots: {longest}.",
        *resolved.notes,
    ]
    return "\n".join(lines) + "\n"
