"""Run a scenario for real: model, prompts and settings in, a trace and what happened out."""

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from moesim.errors import ConfigError
from moesim.policies.registry import Predictor
from moesim.scenario import Scenario
from moesim.trace import TraceWriter
from moesim.workload import Resolved
from profiler.accel import open_device
from profiler.executor.copier import Copier
from profiler.executor.decisions import Decisions
from profiler.executor.executed import Executed, ExecutedRequest, report
from profiler.executor.experts import attached
from profiler.executor.fit import available_bytes, check_before_loading
from profiler.executor.machine import Machine
from profiler.executor.model import OffloadedModel
from profiler.executor.options import ExecuteOptions
from profiler.executor.pacing import Pacer
from profiler.executor.pending import has_staging, refuse_unsupported, settle, transient_slots
from profiler.executor.session import Session, probe_request
from profiler.executor.slots import DeviceRoom, check_room, room_bytes
from profiler.executor.watch import Templates, Watcher, capturing, check_predictable
from profiler.record.generate import Batch, Sampling, run_batch
from profiler.record.prompts import Request
from profiler.record.recording import Recorder, prepare
from profiler.record.settings import RecordSettings


def execute(settings: RecordSettings, scenario: Scenario, options: ExecuteOptions) -> Executed:
    """Load a model and run a scenario on it.

    Parameters
    ----------
    settings : RecordSettings
        Model, prompts and device; the trace is written to ``out / "trace.parquet"``.
    scenario : Scenario
        The settings to execute; its trace is not looked at.
    options : ExecuteOptions
        What the scenario leaves open.

    Returns
    -------
    Executed

    Raises
    ------
    MoesimError
        If something is wrong, does not fit, or cannot be executed; what can be known before the weights are loaded is
        said before.
    """
    refuse_unsupported(scenario)
    with open_device(settings.device.removesuffix(":0")) as device:
        check_before_loading(settings, scenario, options, device)
        recorder, requests = prepare(settings.model_copy(update={"device": "cpu"}))
        with OffloadedModel(recorder, device) as model:
            return run_scenario(model, requests, scenario, settings.out / "trace.parquet", options)


def run_scenario(
    model: OffloadedModel, requests: Sequence[Request], scenario: Scenario, trace: Path, options: ExecuteOptions
) -> Executed:
    """Run one scenario on a model; slots, link and hooks are gone afterwards, also after an error or an interrupt.

    Parameters
    ----------
    model : OffloadedModel
        The model.
    requests : sequence of Request
        Prompts, rising by number; the scenario's filter chooses among them.
    scenario : Scenario
        The settings; their trace is not looked at.
    trace : Path
        File to record to; it is complete or absent.
    options : ExecuteOptions
        What the scenario leaves open.

    Returns
    -------
    Executed

    Raises
    ------
    MoesimError
        If something is wrong, does not fit, cannot be executed, or fails.
    """
    recorder = _recorder_for(model.recorder, scenario)
    # The experts are no longer there to be counted.
    expert_bytes = tuple(layout.expert_bytes for layout in model.layouts)
    meta = recorder.meta().model_copy(update={"expert_bytes": expert_bytes})
    workload = settle(scenario, trace, meta, recorder.columns(), requests)
    resolved = workload.resolved
    _check_bytes(model, resolved, options)
    chosen = [entry for entry in requests if entry.request in set(workload.numbers)]
    with ExitStack() as stack:
        room = _room(model, resolved, chosen, options)
        stack.callback(room.close)
        copier = _copier(model, resolved, options)
        stack.callback(copier.close)
        copier.start()
        machine = Machine(resolved, model.store, room, copier)
        pacer = Pacer(_synchronizer(model), is_paced=options.paced, largest_lag_ns=options.largest_lag_ns)
        decisions = Decisions(workload)
        session = Session(
            recorder, decisions, machine, pacer,
            keeps_prompts=scenario.prefill.mode != "skip", is_grouped=resolved.rules.is_grouped,
        )  # fmt: skip
        stack.enter_context(attached(recorder.routers.sites, session.experts))
        templates = _warm_up(recorder, session, chosen[0])
        decisions.rehearse()
        machine.fill(decisions.slots)
        with TraceWriter(trace, meta, recorder.columns()) as writer:
            done = _run_requests(recorder, session, chosen, templates, writer, options)
    pacer.pacing.link_overrun_ns = copier.overrun_ns
    return report(scenario, trace, done, machine, pacer.pacing)


def _recorder_for(recorder: Recorder, scenario: Scenario) -> Recorder:
    """Settle whether predictions are recorded: where something is copied ahead and the model has them."""
    kind = scenario.prefetch.kind
    if kind == Predictor.LOOKAHEAD:
        if not recorder.settings.lookahead:
            raise ConfigError("lookahead = false, but prefetch.predictor = 'lookahead' needs it; set lookahead = true")
        check_predictable(recorder.routers)
    routers, settings = recorder.routers, recorder.settings
    is_kept = settings.lookahead and kind != Predictor.NONE and not routers.no_lookahead and not routers.has_state
    return dataclasses.replace(recorder, settings=settings.model_copy(update={"lookahead": is_kept}))


def _check_bytes(model: OffloadedModel, resolved: Resolved, options: ExecuteOptions) -> None:
    """Refuse experts of another size than the model's where the device's own link is what is measured."""
    own = np.array([layout.expert_bytes for layout in model.layouts])
    if options.link == "device" and not np.array_equal(own, resolved.expert_bytes):
        layer = int(np.flatnonzero(own != resolved.expert_bytes)[0])
        raise ConfigError(
            f"overrides.expert_bytes: an expert of layer {layer} has {own[layer]} bytes, the scenario says "
            f"{resolved.expert_bytes[layer]}; leave it out, or execute with link = 'emulated'"
        )


def _room(
    model: OffloadedModel, resolved: Resolved, requests: Sequence[Request], options: ExecuteOptions
) -> DeviceRoom:
    """Take the device memory of a run, refused if it does not fit."""
    n_transient = transient_slots(resolved, [len(entry.tokens) for entry in requests])
    stages, capacity = has_staging(resolved), resolved.capacity.tolist()
    sizes = room_bytes(model.layouts, capacity, n_transient, has_staging=stages)
    n_bytes, source = available_bytes(model.device, options, model.resident_bytes)
    check_room(sizes, n_bytes, source)
    return DeviceRoom(model.device, model.layouts, capacity, n_transient, has_staging=stages)


def _copier(model: OffloadedModel, resolved: Resolved, options: ExecuteOptions) -> Copier:
    """Make the link, not begun yet."""
    return Copier(
        model.device,
        is_fifo=resolved.scenario.link.discipline == "fifo",
        start_latency_ns=resolved.link.start_latency_ns if options.link == "emulated" else None,
        largest_lag_ns=options.largest_lag_ns,
    )


def _synchronizer(model: OffloadedModel) -> Any:
    """Give what waits for the compute stream."""
    return model.device.compute.synchronize


def _warm_up(recorder: Recorder, session: Session, first: Request) -> Templates | None:
    """Run a short prompt beside cache and clock; note in the end how predicted layers call their routers."""
    probe = probe_request(first.tokens, recorder.loaded.vocabulary)
    watcher = Watcher(recorder.loaded.model, recorder.routers, session, None)
    with watcher.attached():
        # Decode steps run through other code than prompts, which is loaded when it is first needed.
        for request in (dataclasses.replace(probe, new_tokens=3), probe):
            session.begin_request(request, None)
            with capturing(recorder.routers) as calls:
                run_batch(recorder.loaded.model, Batch([request], Sampling()))
            session.end_request(None)
    return Templates(calls, len(probe.tokens)) if recorder.has_lookahead else None


def _run_requests(
    recorder: Recorder,
    session: Session,
    requests: Sequence[Request],
    templates: Templates | None,
    writer: TraceWriter,
    options: ExecuteOptions,
) -> list[ExecutedRequest]:
    """Run the requests one after the other, the cache kept."""
    done = []
    watcher = Watcher(recorder.loaded.model, recorder.routers, session, templates)
    with watcher.attached():
        for entry in requests:
            batch = recorder.batch([entry], keep_logits=options.keep_logits)
            session.begin_request(entry, batch)
            run_batch(recorder.loaded.model, batch)
            executed = session.end_request(writer)
            if executed is not None:
                done.append(executed)
    return done
