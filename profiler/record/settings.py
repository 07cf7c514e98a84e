"""What a recording is asked to do: frozen settings with one hash, so that a resumed run is the same run."""

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moesim.errors import ConfigError
from moesim.trace.schema import canonical_json


class RecordSettings(BaseModel):
    """Settings of one recording.

    Attributes
    ----------
    model : Path
        Folder of a model (``config.json``, ``*.safetensors``), or a configuration file for random weights.
    prompts : Path
        ``.txt`` with one prompt a line, or ``.jsonl`` with ``text`` (or ``tokens``) and optionally ``domain`` and
        ``new_tokens``.
    out : Path
        Folder of the trace.
    new_tokens : int
        Tokens to generate per request, where the prompt states none.
    batch : int
        Requests that run together.
    sampling : {"greedy", "sample"}
        How the next token is chosen.
    temperature, top_p : float
        Of ``sample``.
    seed : int
        Of sampling, and of random weights.
    prompt_tokens : int or None
        Longer prompts are cut to so many tokens.
    ignore_eos : bool
        Go on after an end-of-sequence token.
    hidden_every : int
        Keep router inputs of every so many positions; 0 keeps none.
    lookahead : bool
        Record the next layer's router on this layer's residual.
    dtype : {"auto", "float32", "bfloat16", "float16"}
        Of the weights; ``auto`` is what the configuration says.
    device : str
        A torch device.
    shard_requests : int
        Requests in a shard, rounded up to whole batches; a crash loses at most one shard.
    allow_repeats : bool
        Accept decode tokens whose values equal the previous token's everywhere.
    limit : int or None
        Use only the first so many prompts.
    name : str or None
        Name of the model in the trace; None: the folder's name.
    licence : str
        Licence of the trace, for its metadata.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path
    prompts: Path
    out: Path
    new_tokens: int = Field(default=64, ge=0)
    batch: int = Field(default=1, ge=1)
    sampling: Literal["greedy", "sample"] = "greedy"
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = Field(default=0, ge=0)
    prompt_tokens: int | None = Field(default=None, ge=1)
    ignore_eos: bool = False
    hidden_every: int = Field(default=0, ge=0)
    lookahead: bool = True
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"
    shard_requests: int = Field(default=8, ge=1)
    allow_repeats: bool = False
    limit: int | None = Field(default=None, ge=1)
    name: str | None = Field(default=None, min_length=1)
    licence: str = Field(default="not stated", min_length=1)

    @model_validator(mode="after")
    def _check(self) -> "RecordSettings":
        if self.sampling == "greedy" and (self.temperature != 1.0 or self.top_p != 1.0):
            raise ValueError("temperature and top_p belong to sampling = 'sample'; greedy takes the best token")
        return self

    @classmethod
    def of(cls, **values: object) -> "RecordSettings":
        """Build settings.

        Raises
        ------
        ConfigError
            Naming the field, its value and what is allowed.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "settings"
            raise ConfigError(f"{where}: {first['msg']} (given: {first['input']!r})") from None

    def digest(self, *facts: str) -> str:
        """Hash everything that decides the recorded values, together with facts about the model and the versions."""
        chosen = self.model_dump(mode="json", exclude={"out", "model", "prompts", "device", "limit"})
        return hashlib.sha256(canonical_json([chosen, *facts]).encode()).hexdigest()
