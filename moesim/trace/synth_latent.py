"""The random model behind synthetic traces: router values as sums of what stays and what changes.

For layer l, token t of request r in domain d, and expert e::

    z = spread_l * popularity[l, e] + domain_strength * D[d, l, e] + request_strength_l * R[r, l, e] + U[t, l, e]

All four parts are standard normal fields. U follows a first-order autoregression over tokens, which makes the jump at
lag 1; D and R do not change within a request, which makes the plateau. Each part of layer l + 1 is correlated with that
of layer l through a fixed permutation of the experts, which makes consecutive layers' sets predict each other.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesim.errors import ConfigError
from moesim.trace.ranking import top_experts

Floats = npt.NDArray[np.float32]

_MAX_SPREAD = 12.0
_MAX_NOISE = 16.0
_PILOT_TOKENS = 384


@dataclass(frozen=True, slots=True, eq=False)
class Latent:
    """The parts that all requests share; L layers, E experts, D domains.

    Attributes
    ----------
    base : float32[L, E]
        spread_l * popularity.
    domains : float32[D, L, E]
        domain_strength * D.
    request_strength, lag_correlation : float32[L]
        Strength of R, and the autoregression's coefficient.
    permutation : int64[L, E]
        ``permutation[l, e]`` is the expert of layer l that goes with expert e of layer l - 1.
    coupling : float
        Correlation between consecutive layers through the permutation.
    """

    base: Floats
    domains: Floats
    request_strength: Floats
    lag_correlation: Floats
    permutation: npt.NDArray[np.int64]
    coupling: float

    def coupled(self, noise: Floats) -> Floats:
        """Correlate independent noise ``[..., L, E]`` over the layers; every value stays standard normal."""
        keep, fresh = np.float32(self.coupling), np.float32(np.sqrt(1 - self.coupling**2))
        result = np.empty_like(noise)
        result[..., 0, :] = noise[..., 0, :]
        for layer in range(1, noise.shape[-2]):
            result[..., layer, :] = fresh * noise[..., layer, :]
            result[..., layer, self.permutation[layer]] += keep * result[..., layer - 1, :]
        return result

    def advance(self, state: Floats | None, noise: Floats) -> Floats:
        """Run the autoregression over tokens.

        Parameters
        ----------
        state : float32[L, E] or None
            U of the token before; None before the first token.
        noise : float32[T, L, E]
            Coupled noise; overwritten.

        Returns
        -------
        float32[T, L, E]
            U.
        """
        keep = self.lag_correlation[:, None]
        fresh = np.sqrt(1 - keep**2)
        for token in range(len(noise)):
            if state is not None:
                noise[token] *= fresh
                noise[token] += keep * state
            state = noise[token]
        return noise


def solve_spread(
    popularity: Floats, domains: Floats, strength: Floats, top_k: int, targets: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Find the popularity spread that gives each layer its Gini coefficient.

    Parameters
    ----------
    popularity : float32[L, E]
        Standard normal.
    domains : float32[D, L, E]
        Scaled domain parts: fixed for the trace, so they are popularity too.
    strength : float32[L]
        Strength of the requests' part.
    top_k : int
        k.
    targets : float64[L]
        Wanted Gini coefficients of the experts' shares of all selections.

    Returns
    -------
    float64[L]
        Spreads, 0 or greater.

    Raises
    ------
    ConfigError
        If a target is out of reach.

    Notes
    -----
    An expert with mean m is selected where its value exceeds a threshold t, with probability Phi((m - t) / sigma)
    and sigma^2 = 1 + strength^2; t makes the probabilities add up to k. The normal distribution function is the
    usual tanh approximation (error below 0.001).
    """
    low: npt.NDArray[np.float64] = np.zeros(len(targets))
    high: npt.NDArray[np.float64] = np.full(len(targets), _MAX_SPREAD)
    reach = [_predicted_gini(popularity, domains, strength, top_k, spread) for spread in (low, high)]
    for layer, target in enumerate(targets):
        if not reach[0][layer] - 0.03 <= target <= reach[1][layer]:
            raise ConfigError(
                f"gini: {target:.2f} is out of reach in layer {layer}; with this top_k, these domains and strengths "
                f"{reach[0][layer]:.2f} to {reach[1][layer]:.2f} can be had; lower domain_strength for less"
            )
    for _ in range(18):
        middle = (low + high) / 2
        too_high = _predicted_gini(popularity, domains, strength, top_k, middle) > targets
        high, low = np.where(too_high, middle, high), np.where(too_high, low, middle)
    return np.add(low, high) / 2


def _predicted_gini(
    popularity: Floats, domains: Floats, strength: Floats, top_k: int, spread: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    mean = (spread[:, None] * popularity + domains) / np.sqrt(1 + strength.astype(np.float64) ** 2)[:, None]
    low, high = mean.min(axis=2, keepdims=True) - 6, mean.max(axis=2, keepdims=True) + 6
    for _ in range(24):
        threshold = (low + high) / 2
        too_many = _normal_cdf(mean - threshold).sum(axis=2, keepdims=True) > top_k
        low, high = np.where(too_many, threshold, low), np.where(too_many, high, threshold)
    share = np.sort(_normal_cdf(mean - threshold).mean(axis=0), axis=1)
    n = share.shape[1]
    result: npt.NDArray[np.float64] = (
        2 * (share * np.arange(1, n + 1)).sum(axis=1) / (n * share.sum(axis=1)) - (n + 1) / n
    )
    return result


def _normal_cdf(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    result: npt.NDArray[np.float64] = 0.5 * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))
    return result


def solve_noise(
    latent: Latent, top_k: int, targets: npt.NDArray[np.float64], rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Find how much noise on the router values gives each layer its lookahead recall, on a pilot sample.

    Parameters
    ----------
    latent : Latent
        The model.
    top_k : int
        k.
    targets : float64[L]
        Wanted share of the selected k among the predicted k; NaN for layers without lookahead.
    rng : numpy.random.Generator
        Draws the pilot.

    Returns
    -------
    float64[L]
        Standard deviation of the noise.

    Raises
    ------
    ConfigError
        If a target is below what popularity alone gives.
    """
    n_layers, n_experts = latent.base.shape
    noise = np.zeros(n_layers)
    for layer in np.flatnonzero(~np.isnan(targets)):
        shape = (_PILOT_TOKENS, n_experts)
        domain = rng.integers(len(latent.domains), size=_PILOT_TOKENS)
        values = latent.base[layer] + latent.domains[domain, layer] + rng.standard_normal(shape, np.float32)
        values += latent.request_strength[layer] * rng.standard_normal(shape, np.float32)
        disturbance = rng.standard_normal(shape, np.float32)
        chosen = top_experts(values.astype(np.float16), top_k)
        low, high = 0.0, _MAX_NOISE
        if _recall(values, disturbance, high, chosen) > targets[layer]:
            raise ConfigError(
                f"lookahead_recall: {targets[layer]:.2f} is out of reach in layer {layer}: popularity alone gives more"
            )
        for _ in range(12):
            middle = (low + high) / 2
            if _recall(values, disturbance, middle, chosen) > targets[layer]:
                low = middle
            else:
                high = middle
        noise[layer] = (low + high) / 2
    return noise


def _recall(values: Floats, disturbance: Floats, amount: float, chosen: npt.NDArray[np.int16]) -> float:
    predicted = top_experts((values + np.float32(amount) * disturbance).astype(np.float16), chosen.shape[1])
    return float((chosen[:, :, None] == predicted[:, None, :]).any(axis=2).mean())
