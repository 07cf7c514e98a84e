"""Events on an idle link where nothing is copied ahead: their copies follow each other, so that times are sums.

Without prefetch an event waits for all that it asks for, and the next one finds the link idle again. The queue of
`moesim.replay.link` would say the same, copy by copy.
"""

import numpy as np
import numpy.typing as npt

from moesim.cache.kernels import kernel
from moesim.cache.lookups import Lookups
from moesim.policies.log import RESIDENT, SUBSTITUTED, DecisionLog
from moesim.policies.registry import Predictor
from moesim.policies.rules import Costs, Rules
from moesim.replay.link import BUSY_NS, BUSY_UNTIL, COPIED_BYTES, N_STARTED, N_WAITING, LinkState
from moesim.replay.timing import COMPUTE_NS, N_HITS
from moesim.replay.waiting import MISS, Waits, book_wait

NONE = int(Predictor.NONE)


@kernel
def is_idle_event(rules: Rules, link: LinkState, now_ns: int) -> bool:
    """Whether an event that begins now can be timed by `run_idle_event`: no copy is under way and none is listed."""
    is_plain = rules.predictor == NONE and link.is_asynchronous and not link.keeps_copies
    return is_plain and link.cursor[BUSY_UNTIL] <= now_ns and link.cursor[N_WAITING] == 0


@kernel
def run_idle_event(
    rules: Rules,
    lookups: Lookups,
    log: DecisionLog,
    link: LinkState,
    costs: Costs,
    waits: Waits,
    n_bytes: int,
    index: int,
    layer: int,
    now_ns: int,
    cells: npt.NDArray[np.int64],
) -> int:
    """Copy an event's misses one after the other and run its experts.

    Parameters
    ----------
    rules, lookups, log, costs
        Policies, events, their decisions, and durations.
    link : LinkState
        Idle; on return busy until the last copy has landed.
    waits : Waits
        Working room.
    n_bytes : int
        Bytes of one expert of the layer.
    index, layer : int
        Pass and layer.
    now_ns : int
        Time of the decision.
    cells : int64[C]
        Row of the layer step.

    Returns
    -------
    int
        Time of the compute stream afterwards.
    """
    event = index * costs.gap_ns.shape[1] + layer
    first, last = lookups.offset[event], lookups.offset[event + 1]
    n_hits, n_missing, compute_ns, missing_ns = 0, 0, 0, 0
    for entry in range(first, last):
        is_hit = log.outcome[entry] == RESIDENT
        is_missing = not (is_hit | (log.outcome[entry] == SUBSTITUTED))
        expert_ns = costs.expert_ns[layer, lookups.n_tokens[entry]]
        compute_ns += expert_ns
        missing_ns += expert_ns * is_missing
        waits.missing[n_missing] = entry
        n_missing += is_missing
        n_hits += is_hit
    n_launches = min(last - first, 1) if rules.is_grouped else last - first
    compute_ns += n_launches * costs.kernel_launch_ns
    shared_ns = costs.shared_ns[index, layer]
    cells[N_HITS] += n_hits
    cells[COMPUTE_NS] += shared_ns + compute_ns
    started = now_ns
    now_ns += shared_ns
    if n_missing == 0:
        return now_ns + compute_ns
    if not rules.is_grouped:
        now_ns += compute_ns - missing_ns - n_missing * costs.kernel_launch_ns
    link.totals[BUSY_NS] -= started
    launch_ns = costs.start_latency_ns + costs.launch_ns
    for position in range(n_missing):
        launched = started + launch_ns
        landed = launched + costs.transfer_ns[layer]
        if landed > now_ns:
            book_wait(started, launched, landed, MISS, now_ns, cells)
            now_ns = landed
        if not rules.is_grouped:
            now_ns += costs.expert_ns[layer, lookups.n_tokens[waits.missing[position]]] + costs.kernel_launch_ns
        started, launch_ns = landed, costs.launch_ns
    link.totals[BUSY_NS] += started
    link.totals[N_STARTED] += n_missing
    link.totals[COPIED_BYTES] += n_missing * n_bytes
    link.cursor[BUSY_UNTIL] = started
    return now_ns + compute_ns if rules.is_grouped else now_ns
