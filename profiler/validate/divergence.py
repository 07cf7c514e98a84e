"""What substitution does to the next token: residents serve misses, and the whole model is the reference.

Both read the same text (teacher forcing), so that every position is compared given the same past.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moesim.errors import ConfigError
from moesim.results import RunResult
from moesim.run import run_scenario as simulate
from moesim.scenario import Scenario
from profiler.accel import Device
from profiler.executor.model import OffloadedModel
from profiler.executor.options import ExecuteOptions
from profiler.executor.run import run_scenario
from profiler.record.generate import run_batch
from profiler.record.prompts import Request
from profiler.record.recording import Recorder

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Proxies:
    """The simulator's first-order measures of what substitution costs, over decode tokens.

    Attributes
    ----------
    stand_in_weight_frac : float
        Share of routing weight that stand-ins serve, mean over requests.
    score_given_up : float
        Router score given up, per token.
    n_substituted : float
        Lookups served by a stand-in, per token.
    """

    stand_in_weight_frac: float
    score_given_up: float
    n_substituted: float


@dataclass(frozen=True, slots=True)
class Divergence:
    """One margin in one cache.

    Attributes
    ----------
    slots : int
        Of every layer.
    alpha : float or None
        Margin of substitution; None: off.
    n_tokens : int
        Positions compared.
    kl_mean, kl_p95 : float
        Kullback-Leibler divergence of the next-token distribution from the whole model's, in nats.
    argmax_frac : float
        Share of positions whose most likely token is the same.
    predicted : Proxies
        Of a replay of the whole model's trace, which knows nothing of what stand-ins do to later routing.
    executed : Proxies
        Of the run itself.
    """

    slots: int
    alpha: float | None
    n_tokens: int
    kl_mean: float
    kl_p95: float
    argmax_frac: float
    predicted: Proxies
    executed: Proxies


def taught(requests: Sequence[Request], n_prompt: int, n_answer: int) -> list[Request]:
    """Cut texts into a prompt and the answer that is forced on the model.

    Parameters
    ----------
    requests : sequence of Request
        Their tokens are the texts.
    n_prompt, n_answer : int
        Tokens of each part, the second at most.

    Raises
    ------
    ConfigError
        If a text is too short to have a decode step.
    """
    cut = []
    for entry in requests:
        answer = entry.tokens[n_prompt : n_prompt + n_answer]
        if len(answer) < 2:
            raise ConfigError(
                f"request {entry.request}: its text has {len(entry.tokens)} tokens; needed: at least {n_prompt + 2}"
            )
        cut.append(Request(entry.request, entry.tokens[:n_prompt], len(answer), entry.domain, answer))
    return cut


def measure_divergence(
    recorder: Recorder,
    device: Device,
    requests: Sequence[Request],
    scenarios: Sequence[Scenario],
    alphas: Sequence[float],
    folder: Path,
    *,
    progress: Progress = lambda _done, _total: None,
) -> tuple[Divergence, ...]:
    """Run texts under growing margins, and compare with the whole model.

    Parameters
    ----------
    recorder : Recorder
        A model on the CPU; it is used up.
    device : Device
        Where it runs.
    requests : sequence of Request
        With answers, see `taught`.
    scenarios : sequence of Scenario
        One per cache size, without substitution.
    alphas : sequence of float
        Margins.
    folder : Path
        For traces.
    progress : callable
        Called with runs done and runs in all.

    Returns
    -------
    tuple of Divergence
        For each scenario first without substitution, whose divergence says how exact the comparison is.
    """
    whole = _whole_model(recorder, requests)
    found: list[Divergence] = []
    n_all = len(scenarios) * (len(alphas) + 1)
    options = ExecuteOptions(keep_logits=True)
    with OffloadedModel(recorder, device) as model:
        for scenario in scenarios:
            exact = run_scenario(model, requests, scenario, folder / "exact.parquet", options)
            runs = [(None, exact.scenario, exact)]
            for alpha in alphas:
                margin = {"substitution.alpha": alpha}
                trace = folder / "substituted.parquet"
                executed = run_scenario(model, requests, scenario.with_settings(margin), trace, options)
                runs.append((alpha, exact.scenario.with_settings(margin), executed))
                progress(len(found) + len(runs), n_all)
            for alpha, replayed, executed in runs:
                logits = [entry.logits for entry in executed.requests if entry.logits is not None]
                kl, same = _compare(whole, logits)
                assert isinstance(scenario.cache.slots, int)
                found.append(
                    Divergence(
                        slots=scenario.cache.slots,
                        alpha=alpha,
                        n_tokens=len(kl),
                        kl_mean=float(kl.mean()),
                        kl_p95=float(np.percentile(kl, 95)),
                        argmax_frac=float(same.mean()),
                        predicted=_proxies(simulate(replayed)),
                        executed=_proxies(executed.result),
                    )
                )
    return tuple(found)


def _whole_model(recorder: Recorder, requests: Sequence[Request]) -> list[Tensor]:
    """Give the logits of every request with all experts in place, through the library's own loop."""
    recorder.loaded.model.set_experts_implementation("eager")
    outputs = []
    for entry in requests:
        batch = recorder.batch([entry], keep_logits=True)
        run_batch(recorder.loaded.model, batch)
        outputs.append(torch.cat(batch.logits))
    return outputs


def _compare(whole: Sequence[Tensor], other: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Give divergence in nats and equality of the most likely token at every position after a decode step."""
    divergences, same = [], []
    for left, right in zip(whole, other, strict=True):
        # The first one comes from the prompt.
        ours, theirs = (torch.log_softmax(logits[1:].double(), dim=-1) for logits in (left, right))
        divergences.append((ours.exp() * (ours - theirs)).sum(dim=-1).clamp(min=0))
        same.append(ours.argmax(dim=-1) == theirs.argmax(dim=-1))
    return torch.cat(divergences).numpy(), torch.cat(same).numpy()


def _proxies(result: RunResult) -> Proxies:
    """Take the proxies from a run's frames."""
    decode = result.steps[result.steps["phase"] == "decode"]
    n_tokens = int(decode["n_tokens"].sum())
    return Proxies(
        stand_in_weight_frac=float(result.requests["stand_in_weight_frac"].mean()),
        score_given_up=float(result.requests["score_given_up"].sum()) / n_tokens,
        n_substituted=int(decode["n_substituted"].sum()) / n_tokens,
    )
