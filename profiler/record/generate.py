"""Run a batch of requests with the library's own cached generation, one forward pass per token and no more.

The token after the last one that a request was asked for is chosen but never processed, so a request of n new tokens
costs one prefill and n - 1 decode steps.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moesim.errors import TraceFormatError
from moesim.seeding import generators
from profiler.record.prompts import Request


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; ``seed`` and a request's number make its stream, whatever runs beside it."""

    kind: Literal["greedy", "sample"] = "greedy"
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(slots=True)
class Batch:
    """Requests that run together, and how far each has come.

    Attributes
    ----------
    requests : sequence of Request
        B of them.
    sampling : Sampling
        How tokens are chosen.
    eos_ids : frozenset of int
        Tokens that end a request.
    pad_id : int
        Left of shorter prompts, and after the end of shorter answers.
    produced : list of list of int
        Tokens chosen so far.
    is_done : list of bool
        Whether a request has its last token.
    times_s : list of float
        Clock when each forward pass was over.
    keep_logits : bool
        Whether to keep the logits of every step in ``logits``, float[B, V] each.
    """

    requests: Sequence[Request]
    sampling: Sampling
    eos_ids: frozenset[int] = frozenset()
    pad_id: int = 0
    keep_logits: bool = False
    produced: list[list[int]] = field(default_factory=list)
    is_done: list[bool] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    _streams: list[np.random.Generator] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.produced = [[] for _ in self.requests]
        self.is_done = [False] * len(self.requests)
        self._streams = [
            generators(self.sampling.seed, f"request {entry.request}")[f"request {entry.request}"]
            for entry in self.requests
        ]

    @property
    def n_columns(self) -> int:
        """Length of the longest prompt."""
        return max(len(entry.tokens) for entry in self.requests)

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Give padded token ids and their mask, int64[B, S] each."""
        shape = (len(self.requests), self.n_columns)
        tokens = torch.full(shape, self.pad_id, dtype=torch.long)
        mask = torch.zeros(shape, dtype=torch.long)
        for row, entry in enumerate(self.requests):
            tokens[row, -len(entry.tokens) :] = torch.tensor(entry.tokens)
            mask[row, -len(entry.tokens) :] = 1
        return tokens.to(device), mask.to(device)

    def choose(self, logits: Tensor) -> list[int]:
        """Choose every request's next token and note which requests have their last one."""
        self.times_s.append(time.perf_counter())
        if self.keep_logits:
            self.logits.append(logits.detach().cpu().clone())
        values = logits.detach().float().cpu().numpy()
        chosen = []
        for row, entry in enumerate(self.requests):
            token = self.pad_id
            if entry.new_tokens == 0:
                self.is_done[row] = True
            if not self.is_done[row]:
                if entry.answer is None:
                    token = _pick(values[row], self.sampling, self._streams[row], entry.request)
                else:
                    token = entry.answer[len(self.produced[row])]
                self.produced[row].append(token)
                self.is_done[row] = len(self.produced[row]) >= entry.new_tokens or token in self.eos_ids
            chosen.append(token)
        return chosen


def _pick(logits: npt.NDArray[np.float32], sampling: Sampling, stream: np.random.Generator, request: int) -> int:
    """Choose one token: the best (lowest id on a tie), or a draw from the smallest set that holds top_p."""
    if np.isnan(logits).any():
        raise TraceFormatError(f"request {request}: the model's logits are NaN; check weights and dtype")
    if sampling.kind == "greedy":
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    shares = np.exp(scaled[order] - scaled[order[0]])
    shares /= shares.sum()
    total = np.cumsum(shares)
    n_kept = min(int(np.searchsorted(total, sampling.top_p)) + 1, len(total))
    return int(
        order[np.searchsorted(total[:n_kept], stream.random() * total[n_kept - 1], side="right").clip(0, n_kept - 1)]
    )


def run_batch(model: Any, batch: Batch) -> None:
    """Run a batch to its end; hooks on the model see one forward pass for each step.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode.
    batch : Batch
        Receives tokens, times and, where asked for, logits.
    """
    import transformers  # noqa: PLC0415

    library: Any = transformers

    class Choice(library.LogitsProcessor):  # type: ignore[misc]
        """Leave greedy search no choice but the batch's own."""

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
            chosen = torch.tensor(batch.choose(scores), device=scores.device)
            return torch.full_like(scores, -torch.inf).scatter_(1, chosen[:, None], 0.0)

    class Done(library.StoppingCriteria):  # type: ignore[misc]
        """End when every request has its last token."""

        def __call__(self, input_ids: Tensor, scores: Any, **_kwargs: Any) -> Tensor:  # noqa: ARG002
            return torch.tensor(batch.is_done, device=input_ids.device)

    tokens, mask = batch.inputs(model.device)
    config = library.GenerationConfig(
        max_new_tokens=max(1, *(entry.new_tokens for entry in batch.requests)),
        do_sample=False,
        use_cache=True,
        pad_token_id=batch.pad_id,
    )
    with torch.inference_mode():
        model.generate(
            input_ids=tokens,
            attention_mask=mask,
            generation_config=config,
            logits_processor=library.LogitsProcessorList([Choice()]),
            stopping_criteria=library.StoppingCriteriaList([Done()]),
        )
