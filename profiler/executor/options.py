"""How a scenario is executed: what the scenario itself leaves open."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ExecuteOptions(BaseModel):
    """Options of an executed run.

    Attributes
    ----------
    paced : bool
        Stretch every compute stage to the duration that the scenario resolves to.
    link : {"emulated", "device"}
        ``emulated``: memory is copied, and a copy lands no earlier than the scenario's link would let it;
        ``device``: a copy lands when the device has copied.
    device_bytes : int or None
        Device memory that everything must fit in; None: what the device has.
    largest_lag_ns : int
        How late the machine may be before a schedule is moved for it: a sleeping thread wakes some tens of us late on
        an idle machine and some ms on a busy one, which the next stage makes up for. Reported times lie at most so far
        before the real ones.
    keep_logits : bool
        Keep the logits of every step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    paced: bool = False
    link: Literal["emulated", "device"] = "emulated"
    device_bytes: int | None = Field(default=None, ge=0)
    largest_lag_ns: int = Field(default=1_000_000, ge=0)
    keep_logits: bool = False
