"""Durations of many passes at once: the cost model asked for each distinct shape, then spread over the passes."""

import numpy as np
import numpy.typing as npt

from moesim.policies.rules import Costs
from moesim.workload.request import Sequences
from moesim.workload.resolve import Resolved


class Durations:
    """Tables of one run, grown as longer contexts and larger events turn up.

    Parameters
    ----------
    resolved : Resolved
        The settled scenario with its cost model.
    """

    def __init__(self, resolved: Resolved) -> None:
        self._resolved = resolved
        self._compute = resolved.compute
        scenario = resolved.scenario
        self._draft_ns = scenario.decode.mtp_depth * scenario.compute.draft_ns
        self._kind_of_layer, self._layer_of_kind = self._layer_kinds()
        self._decode_gap = np.zeros((len(self._layer_of_kind), 0), np.int64)
        self._decode_head = np.zeros(0, np.int64)
        self._expert_ns = np.zeros((resolved.n_layers, 1), np.int64)
        self._decode_router, self._decode_shared = self._router_and_shared(1)

    def _router_ns(self, layer: int, n_tokens: int) -> int:
        """Router, and the host's bookkeeping for the decision that follows."""
        return self._compute.router_ns(layer, n_tokens) + self._resolved.scenario.compute.bookkeeping_ns

    def _router_and_shared(self, n_tokens: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Router and shared expert of every layer for a pass of some tokens, asked for once per kind of layer."""
        resolved, stated = self._resolved, self._compute.stated
        router, shared = np.zeros(resolved.n_layers, np.int64), np.zeros(resolved.n_layers, np.int64)
        known: dict[object, tuple[int, int]] = {}
        for layer in range(resolved.n_layers):
            key = (
                resolved.n_experts[layer],
                *(stated[name][layer] for name in ("router_ns", "shared_ns") if name in stated),
            )
            if key not in known:
                known[key] = (self._router_ns(layer, n_tokens), self._compute.shared_ns(layer, n_tokens))
            router[layer], shared[layer] = known[key]
        return router, shared

    def _layer_kinds(self) -> tuple[npt.NDArray[np.int64], list[int]]:
        """Group layers whose time before the router is the same for every pass."""
        model, stated = self._resolved.model, self._compute.stated
        kinds: dict[object, int] = {}
        layer_of_kind: list[int] = []
        kind_of_layer = np.zeros(self._resolved.n_layers, np.int64)
        for layer in range(self._resolved.n_layers):
            key: list[object] = [stated[name][layer] for name in ("dense_ns", "attention_ns") if name in stated]
            if model is not None and model.attention:
                first = model.moe_layers[layer - 1] + 1 if layer > 0 else 0
                key.extend(model.attention[index] for index in range(first, model.moe_layers[layer] + 1))
            if tuple(key) not in kinds:
                kinds[tuple(key)] = len(layer_of_kind)
                layer_of_kind.append(layer)
            kind_of_layer[layer] = kinds[tuple(key)]
        return kind_of_layer, layer_of_kind

    def _grow_decode_tables(self, longest: int) -> None:
        """Know the time of one-token passes up to a context length."""
        known = self._decode_gap.shape[1]
        if longest < known:
            return
        contexts = range(known, max(longest + 1, 2 * known))
        shapes = [((1, max(1, length)),) for length in contexts]
        gap = [[self._compute.gap_ns(layer, shape) for shape in shapes] for layer in self._layer_of_kind]
        head = [self._compute.output_head_ns(shape, 1) for shape in shapes]
        self._decode_gap = np.concatenate([self._decode_gap, np.array(gap, np.int64)], axis=1)
        self._decode_head = np.concatenate([self._decode_head, np.array(head, np.int64)])

    def _grow_expert_table(self, most_tokens: int) -> None:
        """Know the time of one expert up to a number of tokens."""
        known = self._expert_ns.shape[1]
        if most_tokens < known:
            return
        counts = range(known, max(most_tokens + 1, 2 * known))
        by_kind: dict[object, list[int]] = {}
        rows = []
        for layer in range(self._resolved.n_layers):
            n_bytes = int(self._resolved.expert_bytes[layer])
            stated = self._compute.stated.get("expert_ns")
            model = self._resolved.model
            width = model.expert_width[layer] if model is not None else 0
            key = (n_bytes, width, None if stated is None else int(stated[layer]))
            if key not in by_kind:
                by_kind[key] = [self._compute.expert_ns(layer, count, n_bytes) for count in counts]
            rows.append(by_kind[key])
        self._expert_ns = np.concatenate([self._expert_ns, np.array(rows, np.int64)], axis=1)

    def of_passes(self, sequences: Sequences, is_decode: npt.NDArray[np.uint8], most_tokens: int) -> Costs:
        """Give the durations of one block.

        Parameters
        ----------
        sequences : Sequences
            The sequences of each pass.
        is_decode : uint8[S]
            1 for decode passes, which ask for a successor of every token and draft the next ones.
        most_tokens : int
            Most tokens that any expert gets at once.
        """
        n_tokens = np.add.reduceat(sequences.n_tokens, sequences.offset[:-1])
        is_single = n_tokens == 1
        context = sequences.context[sequences.offset[:-1]]
        self._grow_decode_tables(int(context[is_single].max(initial=0)))
        self._grow_expert_table(most_tokens)
        length = np.where(is_single, context, 0)
        gap = self._decode_gap[self._kind_of_layer[None, :], length[:, None]]
        head = self._decode_head[length]
        router = np.repeat(self._decode_router[None, :], len(n_tokens), axis=0)
        shared = np.repeat(self._decode_shared[None, :], len(n_tokens), axis=0)
        for index in np.flatnonzero(~is_single):
            own = slice(int(sequences.offset[index]), int(sequences.offset[index + 1]))
            shape = tuple(zip(sequences.n_tokens[own].tolist(), sequences.context[own].tolist(), strict=True))
            count = int(n_tokens[index])
            by_kind = np.array([self._compute.gap_ns(layer, shape) for layer in self._layer_of_kind], np.int64)
            gap[index] = by_kind[self._kind_of_layer]
            head[index] = self._compute.output_head_ns(shape, count if is_decode[index] else 1)
            router[index], shared[index] = self._router_and_shared(count)
        head[is_decode == 1] += self._draft_ns
        link = self._resolved.link
        return Costs(
            gap_ns=gap,
            router_ns=router,
            shared_ns=shared,
            head_ns=head,
            expert_ns=self._expert_ns,
            kernel_launch_ns=self._compute.launch_ns(),
            launch_ns=link.launch_ns,
            start_latency_ns=link.start_latency_ns,
            transfer_ns=link.transfer_ns,
            staging_transfer_ns=link.staging_transfer_ns,
        )
