"""One calibration: every quantity sampled in turn, round after round."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from moesim.errors import UnknownNameError
from moesim.specs import GroupedQueryAttention, ModelSpec
from profiler.accel import Device, Facts
from profiler.calibrate.copies import TINY_BYTES, Copies, timed_kernel
from profiler.calibrate.figures import check_copies, fitted_bandwidth
from profiler.calibrate.kernels import Run, Workshop, attention_runs, feed_forward_runs, router_runs
from profiler.calibrate.plan import Plan
from profiler.calibrate.rates import Rates
from profiler.calibrate.spread import Spread

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FLOAT_BITS = 16

Sampler = Callable[[], float]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """What one run measured.

    Attributes
    ----------
    facts : Facts
        The device.
    measured_at : str
        Date and time.
    memory_bytes : int
        Size of device memory.
    model : str or None
        Name of the model whose shapes were timed.
    dtype : str
        Of weights and activations.
    plan : str
        Name of the plan.
    kind : {"pinned", "pageable"}
        Host memory of the link's numbers.
    spreads : dict of str to Spread
        By name of the quantity: ``h2d.…`` for the link, else the part, its layer and its counts.
    copy_ns, best_copy_ns : dict of int to float
        Median and least time of a copy in a row, by bytes, from that memory.
    notes : tuple of str
        What was left out, and why.
    """

    facts: Facts
    measured_at: str
    memory_bytes: int
    model: str | None
    dtype: str
    plan: str
    kind: str
    spreads: dict[str, Spread]
    copy_ns: dict[int, float]
    best_copy_ns: dict[int, float]
    notes: tuple[str, ...] = ()

    def circumstances(self) -> dict[str, Any]:
        """Say on what, when and how it was measured, as plain JSON values."""
        return {
            "device": self.facts.name,
            "clock": self.facts.clock,
            "runtime": self.facts.runtime,
            "measured_at": self.measured_at,
            "model": self.model,
            "dtype": self.dtype,
            "plan": self.plan,
            "host_memory": self.kind,
            "notes": list(self.notes),
        }


def chosen_dtype(name: str, facts: Facts) -> tuple[str, bool]:
    """Give the type of weights, and whether it was asked for: 32 bits on a CPU, bfloat16 elsewhere by default.

    Raises
    ------
    UnknownNameError
        If it is neither "auto" nor one of `DTYPES`.
    """
    if name == "auto":
        return ("float32" if facts.kind == "cpu" else "bfloat16"), False
    if name not in DTYPES:
        raise UnknownNameError.nearest("dtype", name, ("auto", *DTYPES))
    return name, True


def calibrate(
    device: Device,
    plan: Plan,
    model: ModelSpec | None = None,
    *,
    dtype: str = "auto",
    progress: Progress = lambda _done, _total: None,
) -> Calibration:
    """Measure a device.

    Parameters
    ----------
    device : Device
        Left open.
    plan : Plan
        Sizes and repetitions.
    model : ModelSpec, optional
        Its layers' shapes are timed too, and copies of exactly one expert.
    dtype : {"auto", "float32", "bfloat16", "float16"}
        Of weights and activations. With "auto", parts that the model stores in fewer than 16 bits are left out.
    progress : callable
        Called with (samples taken, samples in all).

    Raises
    ------
    CalibrationError
        If the times are none that the device can have.
    """
    facts = device.facts()
    type_name, is_stated = chosen_dtype(dtype, facts)
    shop = Workshop(device.torch_device, DTYPES[type_name], plan.weights_bytes)
    sizes = tuple(sorted({*plan.copy_bytes, *(model.expert_bytes if model is not None else ())}))
    copies, rates = Copies(device, plan, sizes), Rates(device, plan, shop)
    kind = copies.kinds[0]
    samplers = dict(_link_samplers(copies, rates, sizes))
    runs = {f"rate.{name}": run for name, run in rates.runs().items()}
    notes: list[str] = []
    if model is not None:
        layers, notes = model_kernels(shop, plan, model, every_part=is_stated)
        runs |= layers
    for name, run in runs.items():
        samplers[name] = timed_kernel(device, run, plan.least_sample_ns)
    for memory in copies.kinds:
        for size in (TINY_BYTES, *sizes):
            copies.warm_up(memory, size)
    samples = _in_turn(samplers, plan.rounds, progress)
    by_size = {size: samples[f"h2d.{kind}.{size}"] for size in sizes}
    best = {size: min(times) for size, times in by_size.items()}
    check_copies(best)
    return Calibration(
        facts=facts,
        measured_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        memory_bytes=device.memory().total_bytes,
        model=model.name if model is not None else None,
        dtype=type_name,
        plan=plan.name,
        kind=kind,
        spreads=_spreads(samples, by_size, rates, sizes[0], _beside_size(copies, sizes)),
        copy_ns={size: Spread.of(times).median for size, times in by_size.items()},
        best_copy_ns=best,
        notes=tuple(notes),
    )


def _in_turn(samplers: dict[str, Sampler], rounds: int, progress: Progress) -> dict[str, list[float]]:
    """Take one sample of everything, then again, so that what disturbs the machine meets all alike."""
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    done, total = 0, rounds * len(samplers)
    for _ in range(rounds):
        for name, sampler in samplers.items():
            samples[name].append(sampler())
            done += 1
            progress(done, total)
    return samples


def _beside_size(copies: Copies, sizes: tuple[int, ...]) -> int:
    """Choose the size of the copies that run beside compute: the largest of which many make a sample."""
    return max((size for size in sizes if copies.n_in_batch(size) >= 4), default=sizes[0])


def _link_samplers(copies: Copies, rates: Rates, sizes: tuple[int, ...]) -> Iterator[tuple[str, Sampler]]:
    """Give the samplers of the link."""
    for memory in copies.kinds:
        for size in sizes:
            yield f"h2d.{memory}.{size}", partial(copies.copy_ns, memory, size)
    kind, beside = copies.kinds[0], _beside_size(copies, sizes)
    yield "h2d.launch", lambda: copies.copy_ns(kind, TINY_BYTES)
    yield "h2d.idle", lambda: copies.idle_ns(kind, sizes[0])
    yield "h2d.beside_compute", lambda: copies.copy_beside_ns(kind, beside, rates.one_chunk)


def _spreads(
    samples: dict[str, list[float]], by_size: dict[int, list[float]], rates: Rates, smallest: int, beside: int
) -> dict[str, Spread]:
    """Summarise what was sampled and what follows from it, round by round."""
    spreads = {name: Spread.of(values) for name, values in samples.items() if not name.startswith("rate.")}
    rounds = range(len(samples["h2d.launch"]))
    waits = [max(0.0, idle - min(by_size[smallest])) for idle in samples["h2d.idle"]]
    slower = [both / alone for both, alone in zip(samples["h2d.beside_compute"], by_size[beside], strict=True)]
    bandwidth = [fitted_bandwidth({size: times[at] for size, times in by_size.items()}) for at in rounds]
    return spreads | {
        "h2d.start_latency": Spread.of(waits),
        "h2d.contention": Spread.of(slower, "ratio"),
        "h2d.bandwidth": Spread.of(bandwidth, "bytes/s"),
        "memory_bandwidth": Spread.of([rates.stream_bytes * 1e9 / time for time in samples["rate.stream"]], "bytes/s"),
        "flops": Spread.of([rates.matmul_flops * 1e9 / time for time in samples["rate.matmul"]], "flops/s"),
        "kernel_launch": Spread.of(samples["rate.launch"]),
    }


def model_kernels(
    shop: Workshop, plan: Plan, model: ModelSpec, *, every_part: bool
) -> tuple[dict[str, Run], list[str]]:
    """Build the kernels of every shape of layer that a model has.

    Parameters
    ----------
    shop : Workshop
    plan : Plan
        Tokens and contexts.
    model : ModelSpec
    every_part : bool
        Also of parts that the model stores in fewer than 16 bits.

    Returns
    -------
    runs : dict of str to callable
        By part, layer and counts.
    notes : list of str
        What was left out, and why.
    """
    layers = _Layers(shop, plan, model, every_part=every_part)
    layers.build()
    return layers.runs, layers.notes


class _Layers:
    """The kernels of one model, by part; parameters as for `model_kernels`."""

    def __init__(self, shop: Workshop, plan: Plan, model: ModelSpec, *, every_part: bool) -> None:
        self._shop = shop
        self._plan = plan
        self._model = model
        self._every_part = every_part
        self.runs: dict[str, Run] = {}
        self.notes: list[str] = []

    def build(self) -> None:
        """Build all parts."""
        model = self._model
        self._add("router", model.unquantized_bits, self._routers)
        self._add("shared", model.weight_bits, self._shared)
        self._add("expert", model.expert_format.bits, self._experts)
        self._add("attention", model.weight_bits, self._attention)

    def _add(self, part: str, bits: int, runs: Callable[[], Iterator[tuple[str, Run]]]) -> None:
        """Build one part, or say why not."""
        if self._every_part or bits >= _FLOAT_BITS:
            self.runs |= {f"{part}.{name}": run for name, run in runs()}
        else:
            self.notes.append(f"{part}: stored in {bits} bits, so not timed; state a dtype to time it in that")

    def _routers(self) -> Iterator[tuple[str, Run]]:
        for layer in _firsts(self._model.n_experts):
            for n_tokens, run in router_runs(self._shop, self._model, layer, self._plan.layer_tokens).items():
                yield f"{layer}.{n_tokens}", run

    def _shared(self) -> Iterator[tuple[str, Run]]:
        model = self._model
        widths = [model.shared_width] if model.shared_width else []
        widths += [model.dense_width] * model.n_dense_mlps_in_moe_layer
        if widths:
            runs = feed_forward_runs(self._shop, model, tuple(widths), model.n_layers, self._plan.layer_tokens)
            for n_tokens, run in runs.items():
                yield f"0.{n_tokens}", run

    def _experts(self) -> Iterator[tuple[str, Run]]:
        model = self._model
        n_experts = model.n_layers * model.max_n_experts
        for layer in _firsts(model.expert_width):
            width = (model.expert_width[layer],)
            for n_tokens, run in feed_forward_runs(
                self._shop, model, width, n_experts, self._plan.expert_tokens
            ).items():
                yield f"{layer}.{n_tokens}", run

    def _attention(self) -> Iterator[tuple[str, Run]]:
        model = self._model
        for layer in _firsts(model.attention):
            block = model.attention[layer]
            if not isinstance(block, GroupedQueryAttention):
                self.notes.append(
                    f"attention of model layer {layer}: kind {block.kind!r} is not timed, it stays derived"
                )
                continue
            for (n_tokens, n_context), run in attention_runs(self._shop, model, layer, self._plan.passes()).items():
                yield f"{layer}.{n_tokens}.{n_context}", run


def _firsts(shapes: tuple[object, ...]) -> list[int]:
    """Give the first layer of every shape."""
    return sorted({shapes.index(shape) for shape in shapes})
