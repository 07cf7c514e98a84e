"""Load a model from local files: its weights, or random ones after a configuration. Nothing is downloaded."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moesim.errors import ConfigError
from profiler.record.settings import RecordSettings
from profiler.routers.adapters import draw_missing

_WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready to run.

    Attributes
    ----------
    model : Module
        In evaluation mode, on its device.
    encode : callable
        Text to token ids.
    name : str
        For the trace.
    family : str
        ``model_type`` of the configuration.
    vocabulary : int
        Number of token ids.
    eos_ids : frozenset of int
        Tokens that end a request.
    pad_id : int
        What fills the left of shorter prompts.
    max_tokens : int or None
        Longest sequence the configuration allows.
    is_random : bool
        Whether the weights were drawn.
    note : str
        What the trace should say about weights and tokens.
    fingerprint : str
        Hash of the configuration and of names and sizes of the weight files.
    """

    model: Any
    encode: Callable[[str], Sequence[int]]
    name: str
    family: str
    vocabulary: int
    eos_ids: frozenset[int]
    pad_id: int
    max_tokens: int | None
    is_random: bool
    note: str
    fingerprint: str


def load(settings: RecordSettings) -> LoadedModel:
    """Load the model of a recording.

    Parameters
    ----------
    settings : RecordSettings
        Names model, seed, dtype and device.

    Returns
    -------
    LoadedModel

    Raises
    ------
    ConfigError
        If files are missing, the configuration is not understood, or the device is not there.
    """
    # Set before the import below: no path of the library may reach for the network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers  # noqa: PLC0415
    from transformers.utils import logging as imported  # noqa: PLC0415

    # The library's type hints are incomplete.
    library: Any = transformers
    logging: Any = imported
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    path = settings.model
    config_file = path / "config.json" if path.is_dir() else path
    config = read_config(config_file)
    # The library's own way of giving router logits feeds a loss that fails on cached steps; the hooks do not need it.
    for part in (config, config.get_text_config()):
        if getattr(part, "output_router_logits", False):
            part.output_router_logits = False
    folder = config_file.parent
    weights = sorted(file for pattern in _WEIGHTS for file in folder.glob(pattern)) if path.is_dir() else []
    device = _device(settings.device)
    model = _build(config, folder if weights else None, settings, device)
    model.eval().requires_grad_(False)
    text_config = config.get_text_config()
    own = model.generation_config
    eos = own.eos_token_id if own is not None and own.eos_token_id is not None else text_config.eos_token_id
    eos_ids = frozenset(eos if isinstance(eos, list | tuple) else [] if eos is None else [eos])
    # Penalties and filters of a model's own generation settings would change what was asked for.
    model.generation_config = library.GenerationConfig()
    encode, token_note = _encoder(folder if path.is_dir() else None, int(text_config.vocab_size))
    weight_note = "" if weights else f"random weights, seed {settings.seed}"
    return LoadedModel(
        model=model,
        encode=encode,
        name=settings.name or (folder.resolve().name if path.is_dir() else f"{config.model_type}-random"),
        family=str(config.model_type),
        vocabulary=int(text_config.vocab_size),
        eos_ids=eos_ids,
        pad_id=int(getattr(text_config, "pad_token_id", None) or 0),
        max_tokens=getattr(text_config, "max_position_embeddings", None),
        is_random=not weights,
        note="; ".join(note for note in (weight_note, token_note) if note),
        fingerprint=_fingerprint(config_file, weights),
    )


def read_config(path: Path) -> Any:
    """Read a model's configuration from a JSON file.

    Raises
    ------
    ConfigError
        If the file is missing, no JSON, or of a family that the installed library does not know.
    """
    from transformers.models.auto import configuration_auto  # noqa: PLC0415

    known: Any = configuration_auto.CONFIG_MAPPING

    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give a model's folder or its config.json") from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path}: not a readable JSON configuration ({error})") from None
    family = values.get("model_type") if isinstance(values, dict) else None
    if family not in known:
        raise ConfigError(f"{path}: model_type {family!r} is not a family of the installed transformers library")
    try:
        return known[family].from_dict(values)
    except Exception as error:
        raise ConfigError(f"{path}: the library refuses this {family} configuration: {error}") from error


def _build(config: Any, folder: Path | None, settings: RecordSettings, device: torch.device) -> Any:
    import transformers  # noqa: PLC0415

    library: Any = transformers
    dtype: Any = "auto" if settings.dtype == "auto" else getattr(torch, settings.dtype)
    try:
        if folder is not None:
            model = library.AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=dtype, local_files_only=True
            )
            return model.to(device)
        if dtype == "auto":
            dtype = getattr(config, "dtype", None) or torch.float32
        with torch.random.fork_rng(devices=[]), device:
            torch.manual_seed(settings.seed)
            model = library.AutoModelForCausalLM.from_config(config, dtype=dtype)
        std = float(getattr(config.get_text_config(), "initializer_range", None) or 0.02)
        draw_missing(model, torch.Generator().manual_seed(settings.seed), std)
        return model.to(device)
    except (ValueError, OSError, KeyError, AttributeError, TypeError, RuntimeError) as error:
        raise ConfigError(
            f"{settings.model}: the library cannot start this {config.model_type} model: {error}"
        ) from error


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device: {name!r} cannot be used here: {reason}") from None
    return device


def _encoder(folder: Path | None, vocabulary: int) -> tuple[Callable[[str], Sequence[int]], str]:
    """Give the model's own tokenizer, or bytes where it has none."""
    if folder is not None and (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer  # noqa: PLC0415

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return lambda text: tokenizer.encode(text).ids, ""
    if folder is not None and any(folder.glob("tokenizer*")):
        from transformers import AutoTokenizer  # noqa: PLC0415

        slow = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return lambda text: slow(text)["input_ids"], ""
    return lambda text: [byte % vocabulary for byte in text.encode()], "no tokenizer: tokens are the UTF-8 bytes"


def _fingerprint(config_file: Path, weights: Sequence[Path]) -> str:
    digest = hashlib.sha256(config_file.read_bytes())
    for file in weights:
        digest.update(f"{file.name} {file.stat().st_size}".encode())
    return digest.hexdigest()
