"""Errors of a validated grid: per configuration, over all of them, by term, and in the ranking."""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moesim.errors import InvariantError
from profiler.validate.figures import TERMS, Figures
from profiler.validate.grid import Configuration, Repeat


@dataclass(frozen=True, slots=True)
class Error:
    """One latency of one configuration.

    Attributes
    ----------
    measured_ns, lowest_ns, highest_ns : float
        Median over the repeats, and their range.
    predicted_ns : float
        Median over the repeats' own traces.
    total, structure, drift : float
        (predicted - measured) / measured, as the median over the repeats. ``structure`` is what is left when the
        run's own stage times are fed back; ``drift`` is the rest: stages that took other times than the scenario says.
    """

    measured_ns: float
    lowest_ns: float
    highest_ns: float
    predicted_ns: float
    total: float
    structure: float
    drift: float


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration in the report.

    Attributes
    ----------
    name : str
        The scenario's.
    tpot, ttft : Error or None
        None where no run has one.
    terms : dict of str to float
        Predicted minus measured of each of `TERMS` over the measured TPOT, median over the repeats.
    copy : float or None
        Error of the time that a copy of one expert holds the link.
    is_exact : bool
        Whether all decisions of all repeats are the replay's.
    n_compared, n_different : dict of str to int
        Over all repeats, by kind of decision.
    timing_frac : float
        Share of layer steps whose hits, late lookups and misses are all the replay's, least repeat.
    n_overruns : int
        Over all repeats.
    overrun_ns : int
        Over all repeats.
    """

    name: str
    tpot: Error | None
    ttft: Error | None
    terms: Mapping[str, float]
    copy: float | None
    is_exact: bool
    n_compared: Mapping[str, int]
    n_different: Mapping[str, int]
    timing_frac: float
    n_overruns: int
    overrun_ns: int


@dataclass(frozen=True, slots=True)
class Ranking:
    """How the two rank configurations by TPOT.

    Attributes
    ----------
    tau : float or None
        Kendall's tau over the pairs that count; None without any.
    n_pairs, n_ties : int
        Pairs that count, and pairs that are left out because their measured ranges overlap.
    """

    tau: float | None
    n_pairs: int
    n_ties: int


def summarise(configurations: Sequence[Configuration]) -> tuple[Row, ...]:
    """Give one row per configuration."""
    return tuple(_row(item) for item in configurations)


def _row(item: Configuration) -> Row:
    repeats = item.repeats
    terms = {
        term: statistics.median(
            (repeat.predicted.terms_ns[term] - repeat.measured.terms_ns[term]) / _known(repeat.measured.tpot_ns)
            for repeat in repeats
        )
        for term in (TERMS if repeats[0].measured.terms_ns else ())
    }
    copies = [
        repeat.predicted.copy_ns / repeat.measured.copy_ns - 1
        for repeat in repeats
        if repeat.measured.copy_ns and repeat.predicted.copy_ns
    ]
    kinds = repeats[0].agreement.n_compared
    return Row(
        name=item.scenario.name,
        tpot=_error(repeats, lambda figures: figures.tpot_ns),
        ttft=_error(repeats, lambda figures: figures.ttft_ns),
        terms=terms,
        copy=statistics.median(copies) if copies else None,
        is_exact=all(repeat.agreement.is_exact for repeat in repeats),
        n_compared={kind: sum(repeat.agreement.n_compared[kind] for repeat in repeats) for kind in kinds},
        n_different={kind: sum(repeat.agreement.n_different[kind] for repeat in repeats) for kind in kinds},
        timing_frac=min(repeat.agreement.timing_frac for repeat in repeats),
        n_overruns=sum(repeat.n_overruns for repeat in repeats),
        overrun_ns=sum(repeat.overrun_ns for repeat in repeats),
    )


def _known(value: float | None) -> float:
    """Give a value that must be there."""
    if value is None:
        raise InvariantError("a run has a latency in one repeat and none in another")
    return value


def _error(repeats: Sequence[Repeat], of: Callable[[Figures], float | None]) -> Error | None:
    """Compare one latency; None where the runs have none."""
    if of(repeats[0].measured) is None:
        return None
    measured, predicted, fed_back = (
        [_known(of(getattr(repeat, side))) for repeat in repeats] for side in ("measured", "predicted", "fed_back")
    )
    total = statistics.median(one / other - 1 for one, other in zip(predicted, measured, strict=True))
    structure = statistics.median(one / other - 1 for one, other in zip(fed_back, measured, strict=True))
    drift = statistics.median(
        (one - again) / other for one, again, other in zip(predicted, fed_back, measured, strict=True)
    )
    return Error(
        measured_ns=statistics.median(measured),
        lowest_ns=min(measured),
        highest_ns=max(measured),
        predicted_ns=statistics.median(predicted),
        total=total,
        structure=structure,
        drift=drift,
    )


def rank(rows: Sequence[Row]) -> Ranking:
    """Compare the order of the configurations' TPOT (Kendall, "A New Measure of Rank Correlation", 1938).

    Pairs whose measured ranges overlap are left out: the hardware does not rank them itself. A pair that counts and is
    predicted to be equal counts as neither right nor wrong.
    """
    errors = [row.tpot for row in rows if row.tpot is not None]
    score = n_pairs = n_ties = 0
    for one, other in itertools.combinations(errors, 2):
        if one.lowest_ns <= other.highest_ns and other.lowest_ns <= one.highest_ns:
            n_ties += 1
            continue
        n_pairs += 1
        predicted, measured = one.predicted_ns - other.predicted_ns, one.measured_ns - other.measured_ns
        score += 0 if predicted == 0 else 1 if (predicted > 0) == (measured > 0) else -1
    return Ranking(score / n_pairs if n_pairs else None, n_pairs, n_ties)


def overall(rows: Sequence[Row], latency: str) -> dict[str, dict[str, float]]:
    """Give mean, median and largest absolute error of a latency over all configurations.

    Parameters
    ----------
    rows : sequence of Row
        The configurations.
    latency : {"tpot", "ttft"}
        Which one.

    Returns
    -------
    dict
        ``total``, ``structure`` and ``drift``, each with ``mean``, ``p50`` and ``max``; empty where no run has one.
    """
    errors = [error for row in rows if (error := getattr(row, latency)) is not None]
    if not errors:
        return {}
    return {part: _spread([getattr(error, part) for error in errors]) for part in ("total", "structure", "drift")}


def _spread(errors: Sequence[float]) -> dict[str, float]:
    """Give mean, median and largest absolute value."""
    values = [abs(error) for error in errors]
    return {"mean": statistics.fmean(values), "p50": statistics.median(values), "max": max(values)}


def term_errors(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Give mean, median and largest absolute error of each term over all configurations, the largest mean first."""
    own = [row.terms for row in rows if row.terms]
    found = {term: _spread([terms[term] for terms in own]) for term in (TERMS if own else ())}
    return dict(sorted(found.items(), key=lambda pair: -pair[1]["mean"]))


def report_values(rows: Sequence[Row]) -> dict[str, Any]:
    """Give the whole comparison as plain values: shares, not percent; times in ns."""
    ranking = rank(rows)
    copies = [row.copy for row in rows if row.copy is not None]
    return {
        "n_configurations": len(rows),
        "is_exact": all(row.is_exact for row in rows),
        "timing_frac": min(row.timing_frac for row in rows),
        "tpot_error": overall(rows, "tpot"),
        "ttft_error": overall(rows, "ttft"),
        "tpot_error_by_term": term_errors(rows),
        "copy_error": _spread(copies) if copies else None,
        "kendall_tau": ranking.tau,
        "n_pairs": ranking.n_pairs,
        "n_ties": ranking.n_ties,
        "n_overruns": sum(row.n_overruns for row in rows),
        "overrun_ns": sum(row.overrun_ns for row in rows),
    }
