"""What ``moesim profile`` does: read the profiling set, rank, write, and say what was written."""

from pathlib import Path
from typing import Any, Literal

from moesim.cli.output import check_writable, emit, progress_bar
from moesim.errors import ConfigError
from moesim.trace import TraceReader
from moesim.trace.profile import build_profile
from moesim.trace.profile_files import check_suffix, save_profile


def parse_numbers(text: str, setting: str) -> list[int]:
    """Read a list of numbers and ranges.

    Raises
    ------
    ConfigError
        If a part is neither.

    Examples
    --------
    >>> parse_numbers("0-2,7", "--requests")
    [0, 1, 2, 7]
    """
    numbers: list[int] = []
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        try:
            first, last = int(low), int(high or low)
        except ValueError:
            raise ConfigError(f"{setting}: {part!r} is neither a number nor a range; write e.g. 0-9,20") from None
        if last < first or last - first >= 10**7:
            raise ConfigError(f"{setting}: the range {part!r} is empty or absurdly long; write e.g. 0-9,20")
        numbers.extend(range(first, last + 1))
    return numbers


def write_profile(
    trace: Path,
    out: Path,
    requests: str | None,
    *,
    with_domains: bool,
    ranked_by: Literal["scores", "weights", "selections"] | None,
    phase: Literal["prefill", "decode"] | None,
    as_json: bool,
) -> None:
    """Make a profile of a trace and write it.

    Raises
    ------
    MoesimError
        If the trace cannot be read, lacks what is to be ranked by, or the file cannot be written.
    """
    check_suffix(out, "--out")
    check_writable(out, "--out", is_folder=False)
    chosen = None if requests is None else parse_numbers(requests, "--requests")
    reader = TraceReader(trace)
    with progress_bar("profiling") as progress:
        profile = build_profile(
            reader,
            requests=chosen,
            with_domains=with_domains,
            ranked_by=ranked_by,
            phase=phase,
            progress=progress,
        )
    save_profile(out, profile)
    answer: dict[str, Any] = {
        "path": str(out),
        "model": profile.model,
        "ranked_by": profile.ranked_by,
        "score_kind": profile.score_kind,
        "phase": profile.phase or "all tokens",
        "n_layers": len(profile.n_experts or ()),
        "n_requests": len(profile.requests),
        "trace": profile.trace,
        "trace_sha256": profile.trace_sha256,
        "source": profile.provenance.source,
        "domains": {name: domain.n_requests for name, domain in profile.domains.items()},
    }
    flat = answer | {"domains": [f"{name} ({number})" for name, number in answer["domains"].items()]}
    emit(answer if as_json else flat, as_json)
