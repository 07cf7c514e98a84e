"""What is measured, and how long."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

KIB, MIB = 2**10, 2**20
# Attention kernels that take a mask may store all scores of all heads.
_MOST_SCORES = 2**24


class Plan(BaseModel):
    """Sizes and times of one calibration.

    Parameters
    ----------
    name : {"full", "quick"}
    copy_bytes : tuple of int
        Sizes of copies; the model's expert sizes are added.
    rounds : int
        Samples of every quantity. All quantities take turns, so that a disturbance meets all of them.
    batch_bytes, max_batch : int
        A sample copies so many bytes, in two to so many copies.
    least_sample_ns : int
        A sample of compute repeats its kernel until it takes so long.
    weights_bytes : int
        Kernels take turns on so many bytes of weights, so that they read them from memory, not from a cache.
    idle_s : float
        Pause before the link counts as idle.
    matmul_size : int
        Side of the square product that measures operations per second.
    expert_tokens, layer_tokens : tuple of int
        Tokens of an expert; of router and shared experts.
    attention_tokens, contexts : tuple of int
        Tokens of a pass; tokens in the cache. A pass of n tokens is measured with n and with all longer contexts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["full", "quick"] = "full"
    copy_bytes: tuple[int, ...] = Field(min_length=2)
    rounds: int = Field(ge=3)
    batch_bytes: int = Field(default=64 * MIB, ge=1)
    max_batch: int = Field(default=32, ge=2)
    least_sample_ns: int = Field(default=2_000_000, ge=1)
    weights_bytes: int = Field(default=256 * MIB, ge=1)
    idle_s: float = Field(default=0.01, ge=0)
    matmul_size: int = Field(ge=1)
    expert_tokens: tuple[int, ...]
    layer_tokens: tuple[int, ...]
    attention_tokens: tuple[int, ...]
    contexts: tuple[int, ...]

    def passes(self) -> list[tuple[int, int]]:
        """Give the (tokens, context) pairs of attention, in the order of a device file."""
        return [
            (n_tokens, n_context)
            for n_tokens in self.attention_tokens
            for n_context in sorted({*self.contexts, *([n_tokens] if n_tokens > 1 else [])})
            if n_context >= n_tokens and (n_tokens == 1 or n_tokens * n_context <= _MOST_SCORES)
        ]


def _powers(first: int, last: int, factor: int = 2) -> tuple[int, ...]:
    """Give sizes from first to last."""
    sizes = [first]
    while sizes[-1] * factor <= last:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


def plan_for(kind: Literal["gpu", "npu", "cpu"], *, is_quick: bool = False) -> Plan:
    """Give the plan for a kind of device; the quick one is for rehearsals and tests."""
    if is_quick:
        return Plan(
            name="quick",
            copy_bytes=_powers(4 * KIB, 16 * MIB, 4),
            rounds=9,
            batch_bytes=2 * MIB,
            max_batch=8,
            least_sample_ns=300_000,
            weights_bytes=16 * MIB,
            idle_s=0.002,
            matmul_size=256,
            expert_tokens=(1, 4, 16),
            layer_tokens=(1, 16),
            attention_tokens=(1, 16),
            contexts=(16, 128),
        )
    if kind == "cpu":
        return Plan(
            copy_bytes=_powers(4 * KIB, 256 * MIB),
            rounds=11,
            batch_bytes=16 * MIB,
            weights_bytes=128 * MIB,
            matmul_size=512,
            expert_tokens=_powers(1, 256),
            layer_tokens=_powers(1, 256, 4),
            attention_tokens=(1, 8, 64, 256),
            contexts=(16, 128, 1024, 4096),
        )
    return Plan(
        copy_bytes=_powers(4 * KIB, 256 * MIB),
        rounds=21,
        matmul_size=8192,
        expert_tokens=_powers(1, 2048),
        layer_tokens=_powers(1, 4096, 4),
        attention_tokens=(1, 16, 128, 512, 2048),
        contexts=(64, 512, 2048, 8192, 32768),
    )
