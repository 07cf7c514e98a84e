"""``moesim-profiler validate``: scenarios executed for real, and what the simulator says of the same traces."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from moesim.cli.output import check_writable, emit, progress_bar
from moesim.errors import ConfigError, MoesimError
from moesim.scenario import Scenario, parse_override
from moesim.specs import load_model
from profiler.accel import Device, open_device
from profiler.calibrate import calibrate, plan_for, write_calibration
from profiler.cli.validation_report import view, write_report
from profiler.executor.fit import check_before_loading
from profiler.executor.model import OffloadedModel
from profiler.executor.options import ExecuteOptions
from profiler.executor.pending import refuse_unsupported
from profiler.record.recording import prepare
from profiler.record.settings import RecordSettings
from profiler.validate.grid import Configuration, load_configurations, run_grid
from profiler.validate.machine import describe


class Link(StrEnum):
    """Links by the names of `profiler.executor.options`."""

    EMULATED = "emulated"
    DEVICE = "device"


def validate(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO.toml", help="Scenario with variants, or a sweep file.")],
    model: Annotated[Path, typer.Option(help="Folder of a model, or a config.json for random weights.")],
    prompts: Annotated[Path, typer.Option(help="Prompts: .txt, one a line, or .jsonl with text and domain.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the report, the plots and the traces.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a setting, e.g. cache.slots=8.")
    ] = None,
    paced: Annotated[
        bool, typer.Option("--paced", help="Stretch every compute stage to the duration that the scenario states.")
    ] = False,
    link: Annotated[
        Link | None, typer.Option(help="The scenario's link, or the device's own; default: emulated on the CPU only.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cuda, npu or cpu.")] = "cpu",
    device_file: Annotated[
        Path | None, typer.Option(help="Device file to predict with; left out: calibrate first, unless --paced.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Calibrate with few sizes and samples.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds over all configurations, after a warm-up.")] = 3,
    largest_lag_ms: Annotated[
        float, typer.Option(min=0, help="Of --paced: how late the machine may be before the schedule moves.")
    ] = 1.0,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate per request.")] = 16,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Cut longer prompts to so many tokens.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--stop-at-eos", help="Go on after an end-of-sequence token.")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="Of random weights.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Use the first N prompts.")] = None,
    keep_traces: Annotated[bool, typer.Option("--keep-traces/--no-traces", help="Leave the recorded traces.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the tables.")] = False,
) -> None:
    """Execute scenarios on a model, replay the traces that this records, and say how far the simulator is off."""
    check_writable(out, "--out", is_folder=True)
    record = RecordSettings.of(
        model=model, prompts=prompts, out=out, new_tokens=new_tokens, prompt_tokens=prompt_tokens,
        ignore_eos=ignore_eos, seed=seed, limit=limit, device="cpu",
    )  # fmt: skip
    call = _Call(
        path=scenario, settings=tuple(settings or ()), record=record, device=device, device_file=device_file,
        is_quick=quick, is_paced=paced, link=link, largest_lag_ns=round(largest_lag_ms * 1e6), n_repeats=repeats,
        keeps_traces=keep_traces,
    )  # fmt: skip
    report, configurations = _answer(call)
    emit(report, as_json, view(report, configurations))


@dataclass(frozen=True, slots=True)
class _Call:
    """What the command line asks for, beside how to answer."""

    path: Path
    settings: tuple[str, ...]
    record: RecordSettings
    device: str
    device_file: Path | None
    is_quick: bool
    is_paced: bool
    link: Link | None
    largest_lag_ns: int
    n_repeats: int
    keeps_traces: bool


def _answer(call: _Call) -> tuple[dict[str, Any], tuple[Configuration, ...]]:
    """Check everything, calibrate where nothing says what to predict with, run, and write the report."""
    chosen = dict(map(parse_override, call.settings))
    scenarios = load_configurations(call.path, chosen)
    for item in scenarios:
        with _naming(item):
            refuse_unsupported(item)
    device_file = call.device_file
    with open_device(call.device) as opened:
        is_cpu = opened.torch_device.type == "cpu"
        if is_cpu:
            # Results are then the same on every machine, and the link's thread keeps a core.
            torch.set_num_threads(1)
        machine = describe(opened)
        link = (Link.EMULATED if is_cpu else Link.DEVICE) if call.link is None else call.link
        options = ExecuteOptions(paced=call.is_paced, link=link.value, largest_lag_ns=call.largest_lag_ns)
        if device_file is None and not call.is_paced:
            device_file = call.record.out / "device.toml"
            _calibrate(opened, scenarios, device_file, is_quick=call.is_quick)
        if device_file is not None:
            scenarios = load_configurations(call.path, chosen | {"device": str(device_file)})
        for item in scenarios:
            with _naming(item):
                check_before_loading(call.record, item, options, opened)
        configurations = _run(call, scenarios, opened, options)
    head = _head(call) | {
        "machine": machine, "link": options.link, "device_file": str(device_file) if device_file else None
    }  # fmt: skip
    return write_report(call.record.out, head, configurations), configurations


def _head(call: _Call) -> dict[str, Any]:
    """Say in a report what was asked for."""
    record = call.record
    return {
        "scenario": str(call.path), "settings": list(call.settings), "model": str(record.model),
        "prompts": str(record.prompts), "new_tokens": record.new_tokens, "prompt_tokens": record.prompt_tokens,
        "limit": record.limit, "seed": record.seed, "paced": call.is_paced,
        "largest_lag_ns": call.largest_lag_ns if call.is_paced else None, "n_repeats": call.n_repeats,
    }  # fmt: skip


@contextmanager
def _naming(scenario: Scenario) -> Iterator[None]:
    """Say in errors which of several scenarios is meant."""
    try:
        yield
    except MoesimError as error:
        raise type(error)(f"scenario {scenario.name!r}: {error}") from error


def _calibrate(opened: Device, scenarios: tuple[Scenario, ...], path: Path, *, is_quick: bool) -> None:
    """Measure the device, and the layers of the scenarios' model where they name one."""
    models = sorted({item.model for item in scenarios})
    if len(models) > 1:
        raise ConfigError(f"model: the scenarios name {len(models)} models ({', '.join(models)}); one can be executed")
    spec = None if models == ["trace"] else load_model(models[0])
    with progress_bar("calibrating") as progress:
        plan = plan_for(opened.facts().kind, is_quick=is_quick)
        write_calibration(calibrate(opened, plan, spec, progress=progress), path)


def _run(
    call: _Call, scenarios: tuple[Scenario, ...], opened: Device, options: ExecuteOptions
) -> tuple[Configuration, ...]:
    """Load the model once and run all configurations on it."""
    recorder, requests = prepare(call.record)
    with ExitStack() as stack:
        folder = call.record.out / "traces" if call.keeps_traces else Path(stack.enter_context(TemporaryDirectory()))
        model = stack.enter_context(OffloadedModel(recorder, opened))
        progress = stack.enter_context(progress_bar("validating"))
        return run_grid(model, requests, scenarios, folder, options, n_repeats=call.n_repeats, progress=progress)
