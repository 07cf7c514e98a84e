"""Profiles on disk: TOML or Parquet of our own, and the ranked hot lists of others.

What belongs here: bytes to `Profile` and back. What does not: how a ranking is made (`profile`).
"""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
from pydantic import ValidationError

from moesim.errors import ConfigError, TraceFormatError, UnknownNameError
from moesim.files import atomic_write, write_text
from moesim.trace.profile import DomainProfile, Profile, file_digest
from moesim.trace.schema import METADATA_KEY, seal, unseal
from moesim.trace.source import naming
from moesim.trace.tables import read_table

# The type stubs of Arrow change between its versions and miss part of what is called here.
_pa: Any = pa
pq: Any = pyarrow.parquet

_COLUMNS = ("domain", "layer", "rank", "expert")
SUFFIXES = (".toml", ".parquet")


def save_profile(path: Path, profile: Profile) -> None:
    """Write a profile, complete or not at all.

    Parameters
    ----------
    path : Path
        Ending in ``.toml`` (one line per layer, to be read by people) or ``.parquet`` (columns domain, layer, rank,
        expert; the rest as JSON in the footer).
    profile : Profile
        What to write.

    Raises
    ------
    ConfigError
        If the name has another ending.
    """
    check_suffix(path, "profile")
    if path.suffix == ".toml":
        write_text(path, _to_toml(profile))
        return
    rows = [
        (name, layer, rank, expert)
        for name, domain in profile.domains.items()
        for layer, experts in enumerate(domain.experts)
        for rank, expert in enumerate(experts)
    ]
    names, *numbers = zip(*rows, strict=True) if rows else ((), (), (), ())
    arrays = [_pa.array(names, _pa.string()), *(_pa.array(column, _pa.int16()) for column in numbers)]
    head = profile.model_dump(mode="json")
    for domain in head["domains"].values():
        domain["n_layers"] = len(domain.pop("experts"))
    table = _pa.table(arrays, names=list(_COLUMNS)).replace_schema_metadata({METADATA_KEY: seal(head)})
    with atomic_write(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)


def check_suffix(path: Path, setting: str) -> None:
    """Refuse a file name that says neither TOML nor Parquet.

    Raises
    ------
    ConfigError
        Naming the setting and the endings.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{setting} {path}: give a name that ends in {' or '.join(SUFFIXES)}")


def _to_toml(profile: Profile) -> str:
    """Write a profile as TOML."""
    fields = profile.model_dump(mode="json", exclude={"domains", "provenance"}, exclude_none=True)
    lines = [f"{key} = {json.dumps(value)}" for key, value in fields.items()]
    lines += ["", "[provenance]"]
    lines += [
        f"{key} = {json.dumps(value)}"
        for key, value in profile.provenance.model_dump(mode="json", exclude_none=True).items()
    ]
    for name, domain in profile.domains.items():
        lines += ["", f"[domains.{json.dumps(name)}]"]
        lines += [
            f"{key} = {value}"
            for key, value in (("n_requests", domain.n_requests), ("n_tokens", domain.n_tokens))
            if value is not None
        ]
        lists = [f"    {json.dumps(list(experts))}," for experts in domain.experts]
        lines += ["experts = [", *lists, "]"]
    return "\n".join(lines) + "\n"


def load_profile(path: Path, model: str) -> Profile:
    """Read a profile.

    Parameters
    ----------
    path : Path
        A file of `save_profile`, or a Parquet table of hot lists (`moesim.trace.tables`).
    model : str
        Which model's lists to take from a table that holds several; letter case does not count.

    Raises
    ------
    ConfigError, TraceFormatError, UnknownNameError
        If the file is missing, damaged or none of these, or has no lists of the model.
    """
    check_suffix(path, "profile")
    if not path.is_file():
        raise ConfigError(f"profile {path}: no such file; 'moesim profile' writes one")
    try:
        if path.suffix == ".toml":
            with path.open("rb") as handle:
                return Profile.model_validate(tomllib.load(handle))
        return _from_parquet(path, model)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TraceFormatError(f"profile {path}: not TOML: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise TraceFormatError(f"profile {path}: {field + ': ' if field else ''}{first['msg']}") from None


def _from_parquet(path: Path, model: str) -> Profile:
    """Read either kind of Parquet file."""
    with naming(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        raw = (file.metadata.metadata or {}).get(METADATA_KEY)
        if raw is None:
            raise TraceFormatError(f"{path}: no {METADATA_KEY.decode()!r} metadata, so it is no file of this package")
        head = unseal(raw)
        if head.get("kind") == "hotlists":
            return _from_hotlists(path, model)
        if head.get("kind") != "profile":
            raise TraceFormatError(
                f"{path}: is of kind {head.get('kind')!r}, needed is a profile or a table of hot lists"
            )
        frame: pd.DataFrame = file.read(columns=list(_COLUMNS)).to_pandas()
    for name, domain in head["domains"].items():
        domain["experts"] = _lists(frame[frame["domain"] == name], domain.pop("n_layers"))
    return Profile.model_validate(head)


def _from_hotlists(path: Path, model: str) -> Profile:
    """Take one model's rankings out of a table of hot lists."""
    meta, frame = read_table(path, "hotlists")
    wanted = frame[frame["model"].str.lower() == model.lower()]
    if wanted.empty:
        raise UnknownNameError.nearest(f"model of hot lists {path}", model, sorted(frame["model"].unique()))
    n_layers = int(wanted["layer"].max()) + 1
    return Profile(
        model=str(wanted["model"].iloc[0]),
        ranked_by="ranks",
        trace=path.name,
        trace_sha256=file_digest([path]),
        provenance=meta.provenance,
        domains={
            str(name): DomainProfile(experts=_lists(rows, n_layers))
            for name, rows in wanted.groupby("domain", sort=True)
        },
    )


def _lists(rows: pd.DataFrame, n_layers: int) -> tuple[tuple[int, ...], ...]:
    """Give each layer's experts in the order of their ranks."""
    ordered = rows.sort_values(["layer", "rank"], kind="stable")
    layers, experts = ordered["layer"].to_numpy(), ordered["expert"].to_numpy()
    bounds = np.searchsorted(layers, np.arange(n_layers + 1))
    return tuple(tuple(experts[bounds[at] : bounds[at + 1]].tolist()) for at in range(n_layers))
