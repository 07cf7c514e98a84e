"""What the catalog commands print: models, devices, policies and resolved scenarios."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from moesim.cli.output import emit
from moesim.errors import UnknownNameError
from moesim.policies.registry import EVICTIONS, PREDICTORS, Eviction, Predictor
from moesim.scenario import load_scenarios, parse_override, to_toml
from moesim.specs import DeviceSpec, ModelSpec, Quantity, list_devices, list_models, load_device, load_model
from moesim.units import format_bytes

_EVICTION_NEEDS = {Eviction.HISTORY: "router scores, unless eviction.weights.score = 0"}
_PREDICTOR_NEEDS = {Predictor.LOOKAHEAD: "lookahead scores", Predictor.ORACLE: "the future"}


def _table(rows: Sequence[dict[str, str]], numbers: frozenset[str] = frozenset()) -> Table:
    """Lay rows out under their keys, numbers to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in rows[0] if rows else ():
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row.values()))
    return table


def _one_or_range(values: Sequence[int]) -> str:
    """Write per-layer values as one number when all agree, else as smallest to largest."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def _size_range(values: Sequence[int]) -> str:
    """Write per-layer sizes as one size when all agree, else as smallest to largest."""
    texts = list(dict.fromkeys(format_bytes(value) for value in (min(values), max(values))))
    return " - ".join(texts)


def _model_row(model: ModelSpec) -> tuple[dict[str, Any], dict[str, str]]:
    """Give a model as JSON values and as table cells."""
    values = {
        "name": model.name,
        "family": model.family,
        "n_layers": model.n_layers,
        "n_experts": list(model.n_experts),
        "top_k": list(model.top_k),
        "expert_bytes": list(model.expert_bytes),
        "expert_bytes_source": model.expert_bytes_source,
        "source": model.source,
    }
    cells = {
        "name": model.name,
        "layers": str(model.n_layers),
        "experts": _one_or_range(model.n_experts),
        "top-k": _one_or_range(model.top_k),
        "one expert": _size_range(model.expert_bytes),
        "all experts": format_bytes(model.routed_bytes),
        "source": model.source,
    }
    return values, cells


def list_catalog_models(as_json: bool) -> None:
    """Print the models of the catalog."""
    rows = [_model_row(load_model(name)) for name in list_models()]
    numbers = frozenset({"layers", "experts", "top-k", "one expert", "all experts"})
    emit({"models": [values for values, _ in rows]}, as_json, _table([cells for _, cells in rows], numbers))


def _quantities(device: DeviceSpec) -> dict[str, Quantity[Any]]:
    """Give every number of a device with its provenance, the link's under their own names."""
    found: dict[str, Quantity[Any]] = {}
    for prefix, group in (("", device), ("h2d.", device.h2d)):
        for key in type(group).model_fields:
            value = getattr(group, key)
            if isinstance(value, Quantity):
                found[prefix + key] = value
    return found


def _device_row(device: DeviceSpec) -> tuple[dict[str, Any], dict[str, str]]:
    """Give a device as JSON values and as table cells."""
    quantities = _quantities(device)
    link = device.h2d.bandwidth_bytes_per_s
    groups: dict[str, list[str]] = {}
    for key, quantity in quantities.items():
        groups.setdefault(str(quantity.provenance), []).append(key)
    values = {
        "name": device.name,
        "kind": device.kind,
        "quantities": {key: quantity.model_dump(mode="json") for key, quantity in quantities.items()},
    }
    cells = {
        "name": device.name,
        "kind": device.kind,
        "memory": format_bytes(device.memory_bytes.value),
        "link": f"{format_bytes(link.value)}/s",
        "link is": str(link.provenance),
        "all numbers": ", ".join(f"{len(keys)} {provenance}" for provenance, keys in groups.items()),
    }
    return values, cells


def list_catalog_devices(as_json: bool) -> None:
    """Print the devices of the catalog."""
    rows = [_device_row(load_device(name)) for name in list_devices()]
    numbers = frozenset({"memory", "link"})
    emit({"devices": [values for values, _ in rows]}, as_json, _table([cells for _, cells in rows], numbers))


def list_policies(as_json: bool) -> None:
    """Print eviction policies and predictors."""
    rows = [
        {
            "kind": "eviction",
            "name": kind.name.lower(),
            "summary": needs.summary,
            "needs": _EVICTION_NEEDS.get(kind) or _needs(needs.scores, needs.future),
        }
        for kind, needs in EVICTIONS.items()
    ]
    rows += [
        {
            "kind": "predictor",
            "name": kind.name.lower(),
            "summary": summary,
            "needs": _PREDICTOR_NEEDS.get(kind, "-"),
        }
        for kind, summary in PREDICTORS.items()
    ]
    emit({"policies": rows}, as_json, _table(rows))


def _needs(scores: bool, future: bool) -> str:
    """Say what a policy reads from a trace beyond the selections."""
    named = [text for text, is_needed in (("router scores", scores), ("the future", future)) if is_needed]
    return ", ".join(named) or "-"


def show_scenario(path: Path, settings: Sequence[str], variant: str | None, as_json: bool) -> None:
    """Print resolved settings: TOML that loads again, or one JSON object."""
    scenarios = load_scenarios(path, dict(map(parse_override, settings)))
    names = [scenario.name for scenario in scenarios]
    if variant is not None:
        if variant not in names:
            raise UnknownNameError.nearest(f"variant of {path}", variant, names)
        scenarios = (scenarios[names.index(variant)],)
    if as_json:
        shown = [{"hash": item.content_hash, "settings": item.model_dump(mode="json")} for item in scenarios]
        emit({"scenarios": shown}, as_json, "")
        return
    texts = (f"# {item.name}, hash {item.content_hash}\n{to_toml(item, explain=True)}" for item in scenarios)
    sys.stdout.write("\n".join(texts))
