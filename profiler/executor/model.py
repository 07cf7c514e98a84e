"""A model whose routed experts were moved to host memory, ready for any number of runs."""

import contextlib
import dataclasses
from typing import Any, Self

import torch

from moesim.errors import ConfigError, MoesimError, UnsupportedScenarioError
from profiler.accel import Device
from profiler.executor.experts import install
from profiler.executor.store import HostStore, Layout
from profiler.executor.watch import to_device
from profiler.record.recording import Recorder


class OffloadedModel:
    """A model on a device, without its routed experts.

    The model is used up: its own routed weights are gone, and after `close` it cannot run any more.

    Parameters
    ----------
    recorder : Recorder
        A model on the CPU whose routers are understood, and the settings of recording: batch 1, no hidden states.
    device : Device
        Where it is to run.

    Raises
    ------
    ConfigError
        If a setting is one that executing has not, or memory does not suffice; nothing stays allocated then.
    UnsupportedScenarioError
        If the model's experts cannot be computed from slots.
    """

    def __init__(self, recorder: Recorder, device: Device) -> None:
        _check(recorder)
        self.device = device
        self.layouts = layouts_of(recorder)
        self._store: HostStore | None = None
        try:
            install(recorder.loaded.model)
            self._store = HostStore(recorder.routers.sites, self.layouts, device)
            _to_device(recorder.loaded.model, device.torch_device)
        except BaseException:
            self.close()
            raise
        routers = to_device(recorder.routers, device.torch_device)
        self.recorder = dataclasses.replace(recorder, routers=routers)

    @property
    def store(self) -> HostStore:
        """The routed weights."""
        if self._store is None:
            raise MoesimError("the model was closed; load it again")
        return self._store

    @property
    def model(self) -> Any:
        """The library's model."""
        return self.recorder.loaded.model

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights that stay on the device."""
        return sum(tensor.nbytes for tensor in self.model.parameters())

    def close(self) -> None:
        """Let host memory go, pinned memory that torch keeps for later too."""
        if self._store is not None:
            self._store.close()
            self._store = None
        if self.device.can_pin:
            # Not in every version of torch, and an error where its accelerator is not a built-in one.
            with contextlib.suppress(AttributeError, RuntimeError):
                torch._C._accelerator_emptyHostCache()  # noqa: SLF001

    def __enter__(self) -> Self:
        """Use it in a block that closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def layouts_of(recorder: Recorder) -> tuple[Layout, ...]:
    """Lay out every layer's experts; refusals as in `Layout.of`."""
    routers = recorder.routers
    layouts = tuple(Layout.of(site, count) for site, count in zip(routers.sites, routers.n_experts, strict=True))
    if routers.n_identity > 0:
        raise UnsupportedScenarioError(
            f"the model has {routers.n_identity} identity experts, which the executor does not know"
        )
    for site in routers.sites:
        if site.adapter.name != "generic":
            raise UnsupportedScenarioError(
                f"{site.path}: the family is read by an adapter ({site.adapter.name}); the executor runs families "
                "whose experts are given ids and weights"
            )
    return layouts


def _check(recorder: Recorder) -> None:
    settings = recorder.settings
    if settings.batch != 1:
        raise ConfigError(f"batch = {settings.batch}: the executor runs one request at a time; set batch = 1")
    if settings.hidden_every != 0:
        raise ConfigError(f"hidden_every = {settings.hidden_every}: the executor keeps no hidden states; set it to 0")
    if recorder.loaded.model.device.type != "cpu":
        raise ConfigError(
            f"device: the model was loaded on {recorder.loaded.model.device}; load it on the CPU, the executor moves it"
        )


def _to_device(model: Any, device: torch.device) -> None:
    try:
        model.to(device)
    except RuntimeError as error:
        raise ConfigError(
            f"the device cannot hold the weights beside the routed experts: {str(error).splitlines()[0]}"
        ) from None
