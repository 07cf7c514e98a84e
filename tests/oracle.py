"""A naive, slow, obvious model of one run: the judge of the fast ones.

It shares no code with the product. Plain dicts and lists, integer nanoseconds; history is recounted from logs
(`oracle_policies`), the link is a list of copies moved forward one completion at a time (`oracle_link`).
"""

from tests.oracle_input import (
    COUNTERS,
    STALLS,
    Model,
    OracleCosts,
    OracleInput,
    OraclePass,
    OracleRequest,
    OracleResult,
    OracleSettings,
)
from tests.oracle_link import Link
from tests.oracle_lockstep import RequestLog, blocks
from tests.oracle_policies import History, KeepScores, predict, stand_ins

__all__ = ["OracleCosts", "OracleInput", "OraclePass", "OracleRequest", "OracleResult", "OracleSettings", "run_oracle"]


def run_oracle(inp: OracleInput) -> OracleResult:
    """Return the tables of one run, worked out the slow way."""
    return _Run(inp).result()


class _Residents:
    """Who owns a slot: ``entries[(layer, expert)]`` holds the copy that fills it (None: there from the start)."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.settings = model.settings
        self.entries: dict[tuple[int, int], dict] = {}
        if self.settings.warm_start == "lowest_id":
            self._fill_with_lowest_ids()

    def _fill_with_lowest_ids(self) -> None:
        n_experts = self.model.inp.n_experts
        by_expert = [
            (e, layer) for e in range(max(n_experts)) for layer in range(len(n_experts)) if e < n_experts[layer]
        ]
        for expert, layer in by_expert:
            if self.has_room(layer):
                self.place((layer, expert))
            elif self.settings.scope == "global":
                return

    def place(self, key, *, is_prefetch=False) -> dict:
        self.entries[key] = {"copy": None, "unused_prefetch": is_prefetch, "pinned": is_prefetch}
        return self.entries[key]

    def has_room(self, layer: int, without=()) -> bool:
        """Whether one more expert of the layer fits once the experts `without` have left."""
        left = [key for key in self.entries if key not in without]
        if self.settings.scope == "per_layer":
            return sum(key[0] == layer for key in left) < self.model.n_slots(layer)
        expert_bytes = self.model.inp.expert_bytes
        return sum(expert_bytes[key[0]] for key in left) + expert_bytes[layer] <= self.settings.pool_bytes

    def evictable(self, layer: int, spared=()) -> list[tuple[int, int]]:
        """Residents that may make room for an expert of the layer."""
        return [
            key
            for key, entry in self.entries.items()
            if (self.settings.scope == "global" or key[0] == layer) and not entry["pinned"] and key not in spared
        ]

    def victims(self, layer: int, keep: KeepScores, spared=()) -> list[tuple[int, int]] | None:
        """Lowest keep scores first, as many as one expert of the layer needs; None if all would not do."""
        chosen = []
        for key in sorted(self.evictable(layer, spared), key=lambda key: (keep.of(key), key)):
            if self.has_room(layer, chosen):
                break
            chosen.append(key)
        return chosen if self.has_room(layer, chosen) else None

    def unpin(self, layer: int) -> None:
        for key, entry in self.entries.items():
            if key[0] == layer:
                entry["pinned"] = False


class _Run:
    """State that lives over the whole run, and the walk over requests, passes and layers."""

    def __init__(self, inp: OracleInput) -> None:
        self.inp = inp
        self.settings = inp.settings
        self.costs = inp.costs
        self.model = Model(inp)
        self.history = History(self.model)
        self.residents = _Residents(self.model)
        self.link = Link(inp.settings.discipline, inp.costs.launch_overhead_ns, inp.costs.start_latency_ns)
        self.now = 0
        self.rows: list[dict] = []
        self.steps: list[dict] = []

    def result(self) -> OracleResult:
        requests = RequestLog(self.settings.batch)
        for block in blocks(self.model):
            start_ns, n_started, n_dropped = self.now, len(self.link.started), len(self.link.dropped)
            n_steps = len(self.steps)
            for pass_ in block.passes:
                self._run_pass(block.label, pass_)
            self.link.advance(self.now)
            requests.add(
                block, start_ns, self.now, self.steps[n_steps:], self.link.started[n_started:],
                len(self.link.dropped) - n_dropped,
            )  # fmt: skip
        copies = [{k: v for k, v in copy.items() if k != "transfer_ns"} for copy in self.link.copies]
        return OracleResult(self.rows, requests.rows(), self.steps, copies)

    def _run_pass(self, label: int, pass_: OraclePass) -> None:
        start_ns = self.now
        labels = {
            "request": label,
            "step": pass_.step,
            "phase": "decode" if pass_.is_decode else "prefill",
            "n_tokens": pass_.n_tokens,
        }
        rows = [
            {**labels, "layer": layer, "compute_ns": 0, **dict.fromkeys(STALLS + COUNTERS, 0)}
            for layer in range(self.model.n_layers)
        ]
        staged = [layer for layer in range(self.model.n_layers) if self.model.is_staged(pass_, layer)]
        buffers = {layer: self._request_staging(rows[layer]) for layer in staged[:2]}
        if pass_.is_decode:
            self._prefetch_hash_layers(pass_, rows[0])
        self._wait_if_synchronous(rows[0])
        rows[0]["start_ns"] = start_ns
        for layer, row in enumerate(rows):
            row.setdefault("start_ns", self.now)
            if layer in staged:
                self._staged_layer(pass_, layer, row, buffers[layer])
                for following in staged[staged.index(layer) + 2 :][:1]:
                    buffers[following] = self._request_staging(rows[following])
                    self._wait_if_synchronous(row)
            else:
                self._cached_layer(pass_, layer, row)
            row["end_ns"] = self.now
        self.now += self.costs.head_ns
        self.rows.extend(rows)
        totals = {name: sum(row[name] for row in rows) for name in ("compute_ns", *STALLS, *COUNTERS)}
        totals["compute_ns"] += self.costs.head_ns
        labels["n_accepted"] = pass_.n_kept
        self.steps.append({**labels, "start_ns": start_ns, "end_ns": self.now, "head_ns": self.costs.head_ns, **totals})

    # One layer

    def _until_decision(self, layer: int, row: dict) -> None:
        costs = self.costs
        self._compute(row, self._gap_ns(layer) + costs.router_ns[layer] + costs.bookkeeping_ns)
        row["decision_ns"] = self.now

    def _compute(self, row: dict, duration_ns: int) -> None:
        row["compute_ns"] += duration_ns
        self.now += duration_ns

    def _gap_ns(self, layer: int) -> int:
        return self.costs.dense_ns[layer] + self.costs.attention_ns[layer]

    def _experts_ns(self, layer: int, n_experts: int) -> int:
        n_launches = n_experts if self.settings.experts_order == "overlapped" else min(n_experts, 1)
        return n_launches * self.costs.kernel_launch_ns + n_experts * self.costs.expert_ns[layer]

    def _staged_layer(self, pass_: OraclePass, layer: int, row: dict, copy: dict) -> None:
        self._until_decision(layer, row)
        self._compute(row, self.costs.shared_ns[layer])
        self._wait_for(row, copy, "stall_demand_ns")
        n_running = min(self.inp.n_experts[layer], pass_.n_tokens * self.inp.top_k[layer])
        if pass_.rows is not None:
            n_running = len(self.model.demanded(pass_, layer))
        self._compute(row, self._experts_ns(layer, n_running))

    def _cached_layer(self, pass_: OraclePass, layer: int, row: dict) -> None:
        self._until_decision(layer, row)
        self.link.advance(self.now)
        demanded, copies, stalls = self._lookup(pass_, layer, row)
        if pass_.is_decode and layer + 1 < self.model.n_layers and self.inp.routing[layer + 1] != "hash":
            window_ns = self.costs.shared_ns[layer] + self._experts_ns(layer, len(demanded)) + self._gap_ns(layer + 1)
            self._prefetch(pass_, layer + 1, layer, window_ns, row)
        self._wait_if_synchronous(row, stalls)
        self._compute(row, self.costs.shared_ns[layer])
        by_landing = sorted(copies, key=self.link.landing_ns)
        if self.settings.experts_order == "overlapped":
            self._compute(row, self._experts_ns(layer, len(demanded) - len(copies)))
            for copy in by_landing:
                self._wait_for(row, copy, stalls[copy["copy"]])
                self._compute(row, self._experts_ns(layer, 1))
        else:
            for copy in by_landing:
                self._wait_for(row, copy, stalls[copy["copy"]])
            self._compute(row, self._experts_ns(layer, len(demanded)))
        self.residents.unpin(layer)

    def _lookup(self, pass_: OraclePass, layer: int, row: dict) -> tuple[list[int], list[dict], dict[int, str]]:
        """Classify, log, place and request; return D, the copies that D waits for and the stall each one causes."""
        demanded = self.model.demanded(pass_, layer)
        row["n_selections"] += sum(len(ids) for ids in self.model.kept(pass_, layer))
        row["n_lookups"] += len(demanded)
        entries = self.residents.entries
        misses = [expert for expert in demanded if (layer, expert) not in entries]
        late = []
        self.residents.unpin(layer)
        for entry in (entries[layer, expert] for expert in demanded if expert not in misses):
            entry["pinned"] = True
            row["n_prefetch_used"] += entry["unused_prefetch"]
            entry["unused_prefetch"] = False
            if entry["copy"] is not None and not 0 <= entry["copy"]["landed_ns"] <= self.now:
                late.append(entry["copy"])
        row["n_misses"] += len(misses)
        row["n_late"] += len(late)
        row["n_hits"] += len(demanded) - len(misses) - len(late)
        self.history.record(self.model, pass_, layer)
        self._cancel_unwanted(layer, demanded, row)
        misses, stand_ins = self._substitute(pass_, layer, demanded, misses, row)
        late += [e["copy"] for e in stand_ins if e["copy"] is not None and not 0 <= e["copy"]["landed_ns"] <= self.now]
        self._promote(layer, late)
        self._place_misses(pass_, layer, misses, row)
        missing = [self._request_expert("demand", layer, expert, row) for expert in misses]
        stalls = {copy["copy"]: "stall_late_ns" for copy in late}
        stalls |= {copy["copy"]: "stall_demand_ns" for copy in missing}
        return demanded, late + missing, stalls

    def _cancel_unwanted(self, layer: int, demanded: list[int], row: dict) -> None:
        """Drop the layer's waiting prefetches that it does not demand, where settings say so."""
        for copy in self._waiting_prefetches(layer):
            if self.settings.cancel_unstarted and copy["expert"] not in demanded:
                self.link.drop(copy)
                del self.residents.entries[layer, copy["expert"]]
                row["n_prefetch_wasted"] += 1

    def _promote(self, layer: int, late: list[dict]) -> None:
        """Move waiting prefetches that are now waited for to the demand class."""
        for copy in self._waiting_prefetches(layer):
            if copy in late:
                self.link.promote(copy)

    def _waiting_prefetches(self, layer: int) -> list[dict]:
        is_fifo = self.settings.discipline == "fifo"
        return [c for c in self.link.waiting if not is_fifo and c["layer"] == layer and c["kind"] == "prefetch"]

    def _substitute(self, pass_: OraclePass, layer: int, demanded: list[int], misses: list[int], row: dict):
        """Serve misses near the boundary by undemanded residents; return the other misses and the stand-ins."""
        if self.settings.alpha is None or not pass_.is_decode:
            return misses, []
        residents = [e for of_layer, e in self.residents.entries if of_layer == layer]
        stand_in_of = stand_ins(self.model, pass_, layer, misses, set(residents) - set(demanded))
        entries = [self.residents.entries[layer, e] for e in stand_in_of.values()]
        for entry in entries:
            entry["pinned"] = True
        row["n_substituted"] += len(entries)
        return [e for e in misses if e not in stand_in_of], entries

    def _place_misses(self, pass_: OraclePass, layer: int, misses: list[int], row: dict) -> None:
        residents = self.residents
        keep = KeepScores(self.model, self.history, list(residents.entries), layer)
        is_bypass = self.settings.eviction == "belady_bypass"
        if is_bypass:
            misses = sorted(misses, key=lambda expert: self.history.next_use(layer, expert))
        for expert in misses:
            victims = residents.victims(layer, keep)
            if is_bypass and victims:
                own = self.history.next_use(layer, expert)
                if not all(self.history.next_use(*victim) > own for victim in victims):
                    victims = None
            if victims is None:
                row["n_transient"] += 1
                continue
            self._evict(victims, row)
            residents.place((layer, expert))["pinned"] = True
            is_rejected = expert not in self.model.accepted(pass_, layer)
            self.history.record_load(layer, expert, is_touch=is_rejected)

    def _evict(self, victims: list[tuple[int, int]], row: dict) -> None:
        for victim in victims:
            entry = self.residents.entries.pop(victim)
            row["n_evictions"] += 1
            row["n_prefetch_wasted"] += entry["unused_prefetch"]
            if self.settings.discipline == "demand_first" and entry["copy"] in self.link.waiting:
                self.link.drop(entry["copy"])

    # Prefetch

    def _prefetch_hash_layers(self, pass_: OraclePass, row: dict) -> None:
        """Prefetch what the token ids already tell when a decode pass begins."""
        self.link.advance(self.now)
        costs = self.costs
        window_ns = 0
        for layer in range(self.model.n_layers):
            window_ns += self._gap_ns(layer)
            if self.inp.routing[layer] == "hash":
                self._prefetch(pass_, layer, self.model.n_layers - 1, window_ns, row)
            window_ns += costs.router_ns[layer] + costs.bookkeeping_ns + costs.shared_ns[layer]
            window_ns += self._experts_ns(layer, self.inp.top_k[layer])

    def _prefetch(self, pass_: OraclePass, target: int, current: int, window_ns: int, row: dict) -> None:
        """Decide and request the prefetches for layer `target`; `window_ns` of compute lie ahead of its experts."""
        if self.settings.predictor == "none":
            return
        limit = self._prefetch_limit(target, window_ns)
        predicted = predict(self.model, self.history, pass_, target)
        spared = {(target, expert) for expert in predicted}
        scores = self.model.lookahead(pass_, target)
        keep = KeepScores(
            self.model,
            self.history,
            list(self.residents.entries),
            current,
            is_prefetch=True,
            lookahead=None if scores is None else (target, scores),
        )
        issued = []
        for expert in predicted:
            if len(issued) >= limit:
                break
            if (target, expert) in self.residents.entries:
                continue
            victims = self.residents.victims(target, keep, spared)
            if victims is None:
                break
            if self.settings.guard and any(keep.of(victim) > keep.of((target, expert)) for victim in victims):
                continue
            self._evict(victims, row)
            self.residents.place((target, expert), is_prefetch=True)
            self.history.record_load(target, expert, is_touch=True)
            issued.append(expert)
        row["n_prefetches"] += len(issued)
        for expert in issued:
            self._request_expert("prefetch", target, expert, row)

    def _prefetch_limit(self, target: int, window_ns: int) -> int:
        launch_ns, transfer_ns = self.costs.launch_overhead_ns, self.costs.transfer_ns[target]
        if self.settings.window_rule == "paper":
            return min(self.settings.depth, max(0, window_ns - launch_ns) // transfer_ns)
        if self.settings.window_rule == "backlog":
            free_ns = max(0, window_ns - self.link.owed_ns(self.now))
            return min(self.settings.depth, free_ns // (launch_ns + transfer_ns))
        return self.settings.depth

    # Copies and waits

    def _request_expert(self, kind: str, layer: int, expert: int, row: dict) -> dict:
        n_bytes = self.inp.expert_bytes[layer]
        row[f"{kind}_bytes"] += n_bytes
        facts = {"request": row["request"], "step": row["step"], "layer": layer, "expert": expert, "n_bytes": n_bytes}
        copy = self.link.request(self.now, kind, self.costs.transfer_ns[layer], **facts)
        if (layer, expert) in self.residents.entries:
            self.residents.entries[layer, expert]["copy"] = copy
        return copy

    def _request_staging(self, row: dict) -> dict:
        layer = row["layer"]
        n_bytes = self.inp.n_experts[layer] * self.inp.expert_bytes[layer]
        row["demand_bytes"] += n_bytes
        facts = {"request": row["request"], "step": row["step"], "layer": layer, "expert": -1, "n_bytes": n_bytes}
        return self.link.request(self.now, "staging", self.costs.staging_transfer_ns[layer], **facts)

    def _wait_if_synchronous(self, row: dict, stalls: dict[int, str] | None = None) -> None:
        """Wait for all that was requested; what the layer does not demand itself, staging apart, is queueing."""
        self.link.advance(self.now)
        while not self.settings.asynchronous and self.link.running is not None:
            copy = self.link.running
            own = "stall_demand_ns" if copy["kind"] == "staging" else None
            self._wait_for(row, copy, (stalls or {}).get(copy["copy"], own))
            self.link.advance(self.now)

    def _wait_for(self, row: dict, copy: dict, kind: str | None) -> None:
        """Move the clock to the landing of a copy; what follows its launch is booked as `kind`, None: all queueing."""
        landed_ns = self.link.landing_ns(copy)
        if landed_ns <= self.now:
            return
        started_ns = copy["started_ns"] if kind is not None else landed_ns
        launched_ns = min(landed_ns, started_ns + copy["launch_ns"])
        row["stall_queue_ns"] += max(0, started_ns - self.now)
        row["stall_launch_ns"] += max(0, launched_ns - max(self.now, started_ns))
        if kind is not None:
            row[kind] += landed_ns - max(self.now, launched_ns)
        self.now = landed_ns
