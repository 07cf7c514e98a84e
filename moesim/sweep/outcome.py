"""What is kept of one point: its numbers as plain JSON values, which depend on its settings only."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from moesim.errors import TraceFormatError
from moesim.metrics import compute_metrics, tpot_frame
from moesim.metrics.bootstrap import MIN_REQUESTS, mean_interval
from moesim.results import COLUMN_NAMES, SUMMED, RunResult
from moesim.scenario import Scenario

OUTCOME_VERSION = 2

Scalar = int | float | str | None

_SPREAD = {"n", "mean", "p50", "p95", "p99"}
_INFO = (
    "model",
    "device",
    "slots",
    "pool_bytes",
    "cache_bytes",
    "warm_start",
    "score_source",
    "score_kind",
    "trace_provenance",
    "device_provenance",
    "notes",
)
_LAYER_COUNTERS = tuple(COLUMN_NAMES[column] for column in SUMMED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one point.

    Attributes
    ----------
    key : str
        Content hash of its scenario.
    status : {"ok", "failed"}
        Whether it has numbers.
    error_class, error : str or None
        What it failed with.
    metrics : dict
        Every scalar of its metrics, units in the names.
    info : dict
        What its settings came to: model, device, slots, notes.
    requests : dict of str to list
        Columns with one value per request.
    layers : dict of str to list
        Columns with one value per phase and layer, summed over requests.
    digest : str or None
        SHA-256 over all numbers of its steps and requests: equal for runs that agree in every one.
    """

    key: str
    status: Literal["ok", "failed"]
    error_class: str | None = None
    error: str | None = None
    metrics: Mapping[str, Scalar] | None = None
    info: Mapping[str, Scalar] | None = None
    requests: Mapping[str, list[Any]] | None = None
    layers: Mapping[str, list[Any]] | None = None
    digest: str | None = None

    def to_json(self) -> str:
        """Write it as one line of JSON, whose order of names is that of the numbers: tables take theirs from it."""
        return json.dumps({"version": OUTCOME_VERSION, **asdict(self)}, allow_nan=False) + "\n"


def outcome_from_json(text: str, source: str) -> Outcome:
    """Read what `Outcome.to_json` wrote.

    Raises
    ------
    TraceFormatError
        If the text is damaged or of another version.
    """
    try:
        fields = json.loads(text)
        version = fields.pop("version")
        outcome = Outcome(**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TraceFormatError(f"{source}: is no outcome of a point ({error})") from None
    if version != OUTCOME_VERSION:
        raise TraceFormatError(f"{source}: version {version}; this program reads {OUTCOME_VERSION}")
    return outcome


def failed(scenario: Scenario, error: BaseException) -> Outcome:
    """Record a point that has no numbers.

    Parameters
    ----------
    scenario : Scenario
        Its settings.
    error : BaseException
        What it failed with; the scenario's name at the beginning of its message is left out, as tables have it already.
    """
    text = " ".join(str(error).split()).removeprefix(f"scenario {scenario.name!r}: ")
    return Outcome(scenario.content_hash, "failed", error_class=type(error).__name__, error=text)


def outcome_of(result: RunResult) -> Outcome:
    """Keep the numbers of a run.

    Raises
    ------
    InvariantError
        If the result's columns contradict each other.
    """
    return Outcome(
        result.scenario_hash,
        "ok",
        metrics=_metrics(result),
        info=_info(result.info),
        requests=_request_columns(result),
        layers=_layer_columns(result),
        digest=_digest(result),
    )


def _metrics(result: RunResult) -> dict[str, Scalar]:
    """Give the scalars of a run's metrics, and what only a comparison of many runs asks for.

    Added are the interval of the mean TPOT over requests (null where there are too few), the output head's part of a
    step's compute, and the share of routing weight that stand-ins serve.
    """
    flat = scalars(compute_metrics(result).as_dict())
    tpot_ns = tpot_frame(result)["tpot_ns"].dropna().to_numpy(np.float64)
    low_ns, high_ns = mean_interval(tpot_ns) if len(tpot_ns) >= MIN_REQUESTS else (None, None)
    decode = result.steps[result.steps["phase"] == "decode"]
    share = result.requests["stand_in_weight_frac"].mean()
    return flat | {
        "tpot_mean_low_ns": low_ns,
        "tpot_mean_high_ns": high_ns,
        "step_head_ns": float(decode["head_ns"].mean()) if len(decode) else None,
        "stand_in_weight_frac": None if np.isnan(share) else float(share),
    }


def scalars(metrics: Mapping[str, Any]) -> dict[str, Scalar]:
    """Flatten metrics to one level of scalars.

    Parameters
    ----------
    metrics : mapping
        From `moesim.metrics.Metrics.as_dict`.

    Returns
    -------
    dict of str to scalar
        A spread ``tpot_ns`` becomes ``tpot_mean_ns``, ``tpot_p50_ns`` and so on; groups become prefixes; lists of
        requests become their number; values per layer are left out.
    """
    flat: dict[str, Scalar] = {}
    for name, value in metrics.items():
        if name in {"layer_hit_rates", "percentile_method"}:
            continue
        if isinstance(value, Mapping) and set(value) == _SPREAD:
            stem = name.removesuffix("_ns")
            flat[f"{stem}_n"] = value["n"]
            flat |= {f"{stem}_{part}_ns": value[part] for part in ("mean", "p50", "p95", "p99")}
        elif name == "split":
            parts = {key: inner for key, inner in value.items() if key != "mean_ns"}
            flat |= {f"decode_{key}": inner for key, inner in parts.items()}
            flat |= {f"step_{key}": inner for key, inner in value["mean_ns"].items()}
        elif isinstance(value, Mapping):
            flat |= {f"{name}_{key}": inner for key, inner in scalars(value).items()}
        elif isinstance(value, list):
            flat[f"n_{name}"] = len(value)
        else:
            flat[name] = value
    return flat


def _info(info: Mapping[str, Any]) -> dict[str, Scalar]:
    """Give what settings came to, and the bytes that a memory plan gives away."""
    texts = {name: _info_text(info[name]) for name in _INFO if name in info}
    plan = info.get("memory_plan")
    return texts | {"planned_bytes": plan["device_bytes"] - plan["free_bytes"] if plan else None}


def _info_text(value: Any) -> Scalar:
    """Write lists as text, so that a table can hold them."""
    if isinstance(value, list):
        return "; ".join(map(str, value)) if all(isinstance(item, str) for item in value) else json.dumps(value)
    return value if value is None or isinstance(value, int | float | str) else json.dumps(value, sort_keys=True)


def _request_columns(result: RunResult) -> dict[str, list[Any]]:
    """Give one value per request of what statistics over requests need."""
    requests, tokens = result.requests, tpot_frame(result)
    has_first = requests["first_token_ns"] >= 0
    ttft_ns = (requests["first_token_ns"] - requests["arrival_ns"]).where(has_first)
    frame = pd.DataFrame(
        {
            "request": requests["request"],
            "domain": requests["domain"],
            "prompt_tokens": requests["prompt_tokens"],
            "n_output_tokens": requests["n_output_tokens"],
            "tpot_ns": tokens["tpot_ns"].to_numpy(),
            "ttft_ns": ttft_ns,
            "compute_ns": tokens["compute_ns"].to_numpy(),
            "link_busy_ns": requests["link_busy_ns"],
            "n_copies": requests["n_copies"],
            "copied_bytes": requests["copied_bytes"],
        }
    )
    columns = {str(name): values.astype(object).where(values.notna(), None).tolist() for name, values in frame.items()}
    columns["ttft_ns"] = [None if value is None else int(value) for value in columns["ttft_ns"]]
    return columns


def _layer_columns(result: RunResult) -> dict[str, list[Any]]:
    """Give every counter summed over requests, one value per phase and layer; phases that did not occur are absent."""
    names = ["phase", "layer"]
    sums = result.layers.groupby(names, sort=True, observed=True)[list(_LAYER_COUNTERS)].sum().reset_index()
    sums["phase"] = sums["phase"].astype(str)
    return {str(name): values.tolist() for name, values in sums.items()}


def _digest(result: RunResult) -> str:
    """Hash every number of the steps and the requests."""
    total = hashlib.sha256()
    for frame in (result.steps, result.requests):
        for name in frame.columns:
            values = frame[name].cat.codes if name == "phase" else frame[name]
            if pd.api.types.is_numeric_dtype(values):
                total.update(name.encode())
                total.update(np.ascontiguousarray(values.to_numpy()).tobytes())
    return total.hexdigest()
