"""Bytes and shapes to nanoseconds; no clock, no trace.

Every duration is the larger of two times: bytes over the memory bandwidth that kernels reach, and operations over the
compute rate that kernels reach (the roofline of Williams, Waterman and Patterson, 2009). It is rounded to nanoseconds
once, here. A time that the device file holds as measured for the model replaces the derived one, and a stated duration
replaces both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from moesim.errors import ConfigError
from moesim.specs import DeviceSpec, MeasuredCompute, ModelSpec
from moesim.units import NS_PER_S, round_ns

Shape = tuple[tuple[int, int], ...]
"""Sequences of one pass, each as (its tokens in the pass, its tokens in the key-value cache afterwards)."""

PER_LAYER = ("dense_ns", "attention_ns", "router_ns", "shared_ns", "expert_ns")


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """Times of the host-to-device link, integer nanoseconds.

    Attributes
    ----------
    launch_ns : int
        Launch overhead of copying one expert, all its launches together.
    start_latency_ns : int
        Added to a copy that starts on an idle link.
    transfer_ns, staging_transfer_ns : int64[L]
        One expert, and one full layer, across the link.
    """

    launch_ns: int
    start_latency_ns: int
    transfer_ns: npt.NDArray[np.int64]
    staging_transfer_ns: npt.NDArray[np.int64]


def link_costs(
    device: DeviceSpec,
    expert_bytes: npt.NDArray[np.int64],
    layer_bytes: npt.NDArray[np.int64],
    *,
    bandwidth_bytes_per_s: int | None = None,
    launch_overhead_ns: int | None = None,
    start_latency_ns: int | None = None,
    copies_per_expert: int = 1,
) -> LinkCosts:
    """Derive the times of copies.

    Parameters
    ----------
    device : DeviceSpec
        Gives what is not stated.
    expert_bytes, layer_bytes : int64[L]
        One routed expert, and all experts, of each layer.
    bandwidth_bytes_per_s : int, optional
        Replaces the device's size-to-time curve.
    launch_overhead_ns, start_latency_ns : int, optional
        Replace the device's.
    copies_per_expert : int
        Launches that one expert takes; on a measured curve each of them pays for its smaller size.

    Returns
    -------
    LinkCosts
        Transfers are at least 1 ns.
    """

    def transfer_ns(n_bytes: int) -> int:
        if bandwidth_bytes_per_s is not None:
            return max(1, (n_bytes * NS_PER_S + bandwidth_bytes_per_s // 2) // bandwidth_bytes_per_s)
        if device.h2d.curve is None:
            return device.transfer_ns(n_bytes)
        piece = max(1, n_bytes // copies_per_expert)
        rest = max(1, n_bytes - piece * (copies_per_expert - 1))
        return (copies_per_expert - 1) * device.transfer_ns(piece) + device.transfer_ns(rest)

    launch = device.h2d.launch_overhead_ns.value if launch_overhead_ns is None else launch_overhead_ns
    return LinkCosts(
        launch * copies_per_expert,
        device.h2d.start_latency_ns.value if start_latency_ns is None else start_latency_ns,
        np.array([transfer_ns(int(n_bytes)) for n_bytes in expert_bytes], np.int64),
        np.array([transfer_ns(int(n_bytes)) for n_bytes in layer_bytes], np.int64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class ComputeCosts:
    """Compute times of one model on one device.

    Attributes
    ----------
    model : ModelSpec or None
        None when only a trace's shape is known: then every duration must be stated.
    device : DeviceSpec
        Rates.
    n_layers : int
        MoE layers.
    stated : mapping of str to int64[L]
        Durations that replace derived ones, by the names of `PER_LAYER`.
    head_ns, kernel_launch_ns : int or None
        Stated durations of the output head and of a kernel launch.
    """

    model: ModelSpec | None
    device: DeviceSpec
    n_layers: int
    stated: Mapping[str, npt.NDArray[np.int64]]
    head_ns: int | None = None
    kernel_launch_ns: int | None = None
    _attention_by_shape: dict[tuple[int, Shape], int] = field(default_factory=dict)

    def _roofline_ns(self, n_bytes: float, flops: float) -> int:
        """Time of moving bytes and of computing on them, whichever is longer."""
        device = self.device
        bytes_per_s = device.memory_bandwidth_bytes_per_s.value * device.memory_efficiency_frac.value
        flops_per_s = device.peak_flops.value * device.compute_efficiency_frac.value
        return round_ns(max(n_bytes / bytes_per_s, flops / flops_per_s))

    def _known_model(self, setting: str) -> ModelSpec:
        """Give the model, or say which duration is missing without one."""
        if self.model is None:
            raise ConfigError(
                f"compute.{setting} is missing: model = 'trace' knows only the shape of the routing; "
                f"name a model (moesim models lists them) or state compute.{setting}"
            )
        return self.model

    @property
    def measured(self) -> MeasuredCompute | None:
        """Times that the device file holds for this model, by the model's name."""
        return self.device.measured_compute(self.model.name) if self.model is not None else None

    def _measured_ns(
        self, part: str, layer: int, shape: Callable[[ModelSpec, int], object], *counts: int
    ) -> int | None:
        """Measured time of a part of a layer, from the entry whose layer has the same shape; None without one."""
        if self.model is None or self.measured is None:
            return None
        for entry in getattr(self.measured, part):
            if shape(self.model, entry.layer) == shape(self.model, layer):
                return int(entry.time_ns(*counts))
        return None

    def launch_ns(self) -> int:
        """Kernel launch."""
        return self.device.kernel_launch_ns.value if self.kernel_launch_ns is None else self.kernel_launch_ns

    def _model_attention_ns(self, model_layer: int, shape: Shape) -> int:
        """Attention of one layer of the model: weights read once, each sequence's key-value cache once, each token
        attends half a prompt less than the last one.
        """  # noqa: D205
        model = self._known_model("attention_ns")
        block = model.attention.index(model.attention[model_layer]) if model.attention else model_layer
        key = (block, shape)
        if key not in self._attention_by_shape:
            # A batch reads the weights of one sequence and as many entries as one with all their tokens and contexts.
            totals = (sum(n_tokens for n_tokens, _ in shape), sum(n_context for _, n_context in shape))
            measured = self._measured_ns("attention", model_layer, _attention_shape, *totals)
            if measured is not None:
                self._attention_by_shape[key] = measured
                return measured
            attention = model.attention[model_layer] if model.attention else None
            n_sharing = getattr(attention, "n_heads", 1) // getattr(attention, "n_kv_heads", 1)
            n_bytes, flops = model.attention_bytes(model_layer), 0.0
            for n_tokens, n_context in shape:
                n_mean = n_context - n_tokens // 2
                n_values = model.kv_read_bytes(model_layer, n_mean) * 8 // model.kv_bits
                flops += 2.0 * n_tokens * (model.attention_parameters(model_layer) + n_values * n_sharing)
                n_bytes += model.kv_read_bytes(model_layer, n_context)
            self._attention_by_shape[key] = self._roofline_ns(n_bytes, flops)
        return self._attention_by_shape[key]

    def _dense_layer_ns(self, model_layer: int, shape: Shape) -> int:
        """Attention and MLP of a layer without experts."""
        model = self._known_model("dense_ns")
        n_tokens = sum(n_tokens for n_tokens, _ in shape)
        mlp = self._roofline_ns(model.dense_mlp_bytes, 2.0 * n_tokens * model.dense_mlp_parameters)
        return self._model_attention_ns(model_layer, shape) + mlp

    def gap_ns(self, layer: int, shape: Shape) -> int:
        """Time from the end of one MoE layer to the router of the next: dense layers between, and attention.

        Parameters
        ----------
        layer : int
            MoE layer that follows.
        shape : tuple of (int, int)
            Tokens of each sequence in the pass, and in its cache after the pass.
        """
        if "dense_ns" in self.stated:
            dense = int(self.stated["dense_ns"][layer])
        else:
            model = self._known_model("dense_ns")
            first = model.moe_layers[layer - 1] + 1 if layer > 0 else 0
            between = range(first, model.moe_layers[layer])
            dense = sum(self._dense_layer_ns(index, shape) for index in between)
        if "attention_ns" in self.stated:
            return dense + int(self.stated["attention_ns"][layer])
        model = self._known_model("attention_ns")
        return dense + self._model_attention_ns(model.moe_layers[layer], shape)

    def router_ns(self, layer: int, n_tokens: int) -> int:
        """Router of a layer."""
        if "router_ns" in self.stated:
            return int(self.stated["router_ns"][layer])
        model = self._known_model("router_ns")
        measured = self._measured_ns("router", layer, _router_shape, n_tokens)
        if measured is not None:
            return measured
        return self._roofline_ns(model.router_bytes(layer), 2.0 * n_tokens * model.router_parameters(layer))

    def shared_ns(self, layer: int, n_tokens: int) -> int:
        """Shared experts of a layer, and dense MLPs inside it."""
        if "shared_ns" in self.stated:
            return int(self.stated["shared_ns"][layer])
        model = self._known_model("shared_ns")
        measured = self._measured_ns("shared", layer, _any_shape, n_tokens)
        if measured is not None:
            return measured
        n_dense = model.n_dense_mlps_in_moe_layer
        n_bytes = model.shared_expert_bytes + n_dense * model.dense_mlp_bytes
        n_parameters = model.shared_expert_parameters + n_dense * model.dense_mlp_parameters
        return self._roofline_ns(n_bytes, 2.0 * n_tokens * n_parameters)

    def expert_ns(self, layer: int, n_tokens: int, expert_bytes: int) -> int:
        """One routed expert with some tokens, without its kernel launch; 0 without tokens."""
        if n_tokens == 0:
            return 0
        if "expert_ns" in self.stated:
            return int(self.stated["expert_ns"][layer])
        model = self._known_model("expert_ns")
        measured = self._measured_ns("expert", layer, _expert_shape, n_tokens)
        if measured is not None:
            return measured
        return self._roofline_ns(expert_bytes, 2.0 * n_tokens * model.expert_parameters(layer))

    def output_head_ns(self, shape: Shape, n_outputs: int) -> int:
        """Layers after the last MoE layer, and the output head for some tokens.

        Parameters
        ----------
        shape : tuple of (int, int)
            As for `gap_ns`.
        n_outputs : int
            Tokens whose successor is asked for: the last one of a prompt, every one of a decode step.
        """
        if self.head_ns is not None:
            return self.head_ns
        model = self._known_model("head_ns")
        after = range(model.moe_layers[-1] + 1, model.n_hidden_layers)
        dense = sum(self._dense_layer_ns(index, shape) for index in after)
        return dense + self._roofline_ns(model.head_bytes, 2.0 * n_outputs * model.head_parameters)


def _attention_shape(model: ModelSpec, model_layer: int) -> object:
    """Tell what decides a layer's attention time; layers beyond the model's are none."""
    return model.attention[model_layer] if model_layer < len(model.attention) else (model.name, model_layer)


def _router_shape(model: ModelSpec, layer: int) -> object:
    """Tell what decides a router's time."""
    return model.n_experts[layer] if layer < model.n_layers else None


def _any_shape(_model: ModelSpec, _layer: int) -> object:
    """Tell that all layers are alike: shared experts have one shape."""
    return True


def _expert_shape(model: ModelSpec, layer: int) -> object:
    """Tell what decides an expert's time."""
    return model.expert_width[layer] if layer < model.n_layers else None
