"""``moesim-profiler validate``: scenarios executed for real, and what the simulator says of the same traces."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
    chosen = dict(map(parse_override, settings or ()))
    scenarios = load_configurations(scenario, chosen)
    for item in scenarios:
        with _naming(item):
            refuse_unsupported(item)
    with open_device(device) as opened:
        is_cpu = opened.torch_device.type == "cpu"
        if is_cpu:
            # Results are then the same on every machine, and the link's thread keeps a core.
            torch.set_num_threads(1)
        machine = describe(opened)
        emulated_or_device = (Link.EMULATED if is_cpu else Link.DEVICE) if link is None else link
        options = ExecuteOptions(paced=paced, link=emulated_or_device.value, largest_lag_ns=round(largest_lag_ms * 1e6))
        if device_file is None and not paced:
            device_file = out / "device.toml"
            _calibrate(opened, scenarios, device_file, is_quick=quick)
        if device_file is not None:
            scenarios = load_configurations(scenario, chosen | {"device": str(device_file)})
        for item in scenarios:
            with _naming(item):
                check_before_loading(record, item, options, opened)
        configurations = _run(record, scenarios, opened, options, repeats, keep_traces=keep_traces)
    head: dict[str, Any] = {
        "scenario": str(scenario), "model": str(model), "prompts": str(prompts), "machine": machine,
        "paced": paced, "link": options.link, "device_file": str(device_file) if device_file else None,
        "largest_lag_ns": options.largest_lag_ns if paced else None, "n_repeats": repeats, "new_tokens": new_tokens,
        "prompt_tokens": prompt_tokens, "limit": limit, "seed": seed, "settings": settings or [],
    }  # fmt: skip
    report = write_report(out, head, configurations)
    emit(report, as_json, view(report, configurations))


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
    record: RecordSettings,
    scenarios: tuple[Scenario, ...],
    opened: Device,
    options: ExecuteOptions,
    n_repeats: int,
    *,
    keep_traces: bool,
) -> tuple[Configuration, ...]:
    """Load the model once and run all configurations on it."""
    recorder, requests = prepare(record)
    with ExitStack() as stack:
        folder = record.out / "traces" if keep_traces else Path(stack.enter_context(TemporaryDirectory()))
        model = stack.enter_context(OffloadedModel(recorder, opened))
        progress = stack.enter_context(progress_bar("validating"))
        return run_grid(model, requests, scenarios, folder, options, n_repeats=n_repeats, progress=progress)
