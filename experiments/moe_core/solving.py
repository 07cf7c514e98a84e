"""One root finder for all fits: no derivatives, no randomness, few evaluations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Solution:
    """Where a function reaches its target.

    Attributes
    ----------
    argument, value : float
        The argument found, and the function there.
    target : float
        What was asked for.
    is_reached : bool
        False if the target lies outside what the ends of the range give: then `argument` is the nearer end.
    """

    argument: float
    value: float
    target: float
    is_reached: bool


def solve_near(
    function: Callable[[float], float], guess: float | None, search: Sequence[float], target: float, *, tolerance: float
) -> Solution:
    """Search near a guess first, and the whole range if the target is not there.

    Parameters
    ----------
    function, search, target, tolerance
        As in `solve`.
    guess : float or None
        An argument that should be close; None: there is none.
    """
    if guess is not None:
        near = solve(function, (0.8 * guess, 1.2 * guess), target, tolerance=tolerance)
        if near.is_reached:
            return near
    return solve(function, search, target, tolerance=tolerance)


def solve(
    function: Callable[[float], float],
    search: Sequence[float],
    target: float,
    *,
    tolerance: float,
    n_most: int = 24,
) -> Solution:
    """Find where a monotone function reaches a target: regula falsi in its Illinois form.

    Parameters
    ----------
    function : callable
        Rising or falling on the whole range.
    search : sequence of float
        The two ends of the range.
    target : float
        Wanted value.
    tolerance : float
        Accepted distance of the function from the target.
    n_most : int
        Most evaluations between the ends.
    """
    low, high = search
    ends = [(low, function(low) - target), (high, function(high) - target)]
    best = min(ends, key=lambda end: abs(end[1]))
    if ends[0][1] * ends[1][1] > 0:
        return Solution(best[0], best[1] + target, target, abs(best[1]) <= tolerance)
    (left, below), (right, above) = ends
    moved = 0
    for _ in range(n_most):
        if abs(best[1]) <= tolerance:
            break
        middle = (left * above - right * below) / (above - below)
        distance = function(middle) - target
        if abs(distance) < abs(best[1]):
            best = (middle, distance)
        # An end that stays twice in a row counts half, else it would stay for ever on a curved function.
        if distance * above > 0:
            below = below / 2 if moved > 0 else below
            right, above, moved = middle, distance, 1
        else:
            above = above / 2 if moved < 0 else above
            left, below, moved = middle, distance, -1
    return Solution(best[0], best[1] + target, target, abs(best[1]) <= tolerance)
