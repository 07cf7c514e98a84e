"""What a model and a device are: specs, their catalog, and readers for published configs."""

from moesim.specs.attention import (
    AttentionBlock,
    CompressedAttention,
    GroupedQueryAttention,
    LatentAttention,
    LinearAttention,
    MambaMixer,
)
from moesim.specs.device import AttentionTimes, DeviceSpec, HostToDeviceLink, MeasuredCompute, Quantity, TimesByTokens
from moesim.specs.families import FAMILIES, FamilyShape
from moesim.specs.formats import ExpertFormat
from moesim.specs.hf_config import spec_from_config
from moesim.specs.loading import list_devices, list_models, load_device, load_model
from moesim.specs.model import ModelSpec

__all__ = [
    "FAMILIES",
    "AttentionBlock",
    "AttentionTimes",
    "CompressedAttention",
    "DeviceSpec",
    "ExpertFormat",
    "FamilyShape",
    "GroupedQueryAttention",
    "HostToDeviceLink",
    "LatentAttention",
    "LinearAttention",
    "MambaMixer",
    "MeasuredCompute",
    "ModelSpec",
    "Quantity",
    "TimesByTokens",
    "list_devices",
    "list_models",
    "load_device",
    "load_model",
    "spec_from_config",
]
