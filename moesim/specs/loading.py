"""Find a model or device by catalog name or path."""

from pathlib import Path
from typing import Any

from moesim.errors import ConfigError, UnknownNameError
from moesim.specs.device import DeviceSpec
from moesim.specs.formats import ExpertFormat
from moesim.specs.hf_config import read_config, spec_from_config
from moesim.specs.model import ModelSpec
from moesim.specs.validation import read_toml, validated

_CATALOG = Path(__file__).parent / "catalog"
_CONFIG_NAME = "config.json"
# Top-level keys of a model's TOML file; [config] and [spec] exclude each other.
_MODEL_KEYS = ("name", "source", "assumed", "config", "experts", "overrides", "spec")


def list_models() -> tuple[str, ...]:
    """Name every model of the catalog, sorted."""
    return _names("models")


def list_devices() -> tuple[str, ...]:
    """Name every device of the catalog, sorted."""
    return _names("devices")


def load_model(name_or_path: str) -> ModelSpec:
    """Load a model.

    Parameters
    ----------
    name_or_path : str
        A catalog name in any case; a TOML spec; a ``config.json``, or a folder that holds one. ``*.safetensors``
        beside a ``config.json`` decide the expert bytes.

    Returns
    -------
    ModelSpec

    Raises
    ------
    UnknownNameError
        If the name is in no catalog, or no reader knows the config's family.
    ConfigError
        If the file is missing or wrong, or the model is dense.

    Examples
    --------
    >>> load_model("DeepSeek-V4-Flash").expert_bytes[0]
    13369344
    """
    path = _locate(name_or_path, "models", "model")
    file = _shown(path, name_or_path)
    if path.is_dir():
        path = path / _CONFIG_NAME
        if not path.is_file():
            raise ConfigError(f"{file}: holds no {_CONFIG_NAME}")
    if path.suffix == ".toml":
        return _model_from_toml(read_toml(path, file), file)
    is_checkpoint = path.name == _CONFIG_NAME
    return spec_from_config(
        read_config(path),
        file=str(path),
        name=path.resolve().parent.name if is_checkpoint else path.stem,
        source=str(path),
        folder=path.parent if is_checkpoint else None,
    )


def load_device(name_or_path: str) -> DeviceSpec:
    """Load a device.

    Parameters
    ----------
    name_or_path : str
        A catalog name in any case, or a TOML file.

    Returns
    -------
    DeviceSpec

    Raises
    ------
    UnknownNameError
        If the name is in no catalog.
    ConfigError
        If the file is missing, a field is wrong, or the link's bandwidth is implausible.

    Examples
    --------
    >>> load_device("rtx-4090").memory_bytes.value
    25769803776
    """
    path = _locate(name_or_path, "devices", "device")
    file = _shown(path, name_or_path)
    return validated(DeviceSpec, read_toml(path, file), file)


def _names(kind: str) -> tuple[str, ...]:
    """Stems of a catalog's files."""
    return tuple(sorted(path.stem for path in (_CATALOG / kind).glob("*.toml")))


def _locate(name_or_path: str, kind: str, what: str) -> Path:
    """Find the file: catalog names first, so that a folder of the same name changes nothing."""
    name = name_or_path.lower()
    if name in _names(kind):
        return _CATALOG / kind / f"{name}.toml"
    path = Path(name_or_path)
    if path.exists():
        return path
    if path.suffix in {".toml", ".json"} or len(path.parts) > 1:
        raise ConfigError(f"{what} {name_or_path!r}: no such file; give a path that exists or a catalog name")
    raise UnknownNameError.nearest(what, name_or_path, _names(kind))


def _shown(path: Path, name_or_path: str) -> str:
    """Name a file in messages: catalog files by their place in the catalog, others as the user wrote them."""
    return f"catalog/{path.relative_to(_CATALOG)}" if path.is_relative_to(_CATALOG) else name_or_path


def _model_from_toml(content: dict[str, Any], file: str) -> ModelSpec:
    """Read a model's TOML: the published config keys in [config], or the spec's own fields in [spec]."""
    for key in content:
        if key not in _MODEL_KEYS:
            raise ConfigError(f"{file}: {UnknownNameError.nearest('key', key, _MODEL_KEYS)}")
    missing = [key for key in ("name", "source") if not isinstance(content.get(key), str)]
    if missing or ("config" in content) == ("spec" in content):
        raise ConfigError(f"{file}: needs the texts name and source, and either a [config] or a [spec] table")
    notes = tuple(f"assumed: {text}" for text in content.get("assumed", ()))
    if "spec" in content:
        given = {key: content[key] for key in ("name", "source")}
        return validated(ModelSpec, {"family": "custom", "notes": notes, **content["spec"], **given}, file)
    experts = content.get("experts")
    return spec_from_config(
        content["config"],
        file=file,
        name=content["name"],
        source=content["source"],
        notes=notes,
        experts=None if experts is None else validated(ExpertFormat, experts, file),
        overrides=content.get("overrides"),
    )
