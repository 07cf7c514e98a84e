"""The oracle's history, keep scores and predictors: nothing is kept up to date, all is recounted from two logs."""

from tests.oracle_input import Model, OraclePass
from tests.oracle_lockstep import event_plan

NEVER = 2**62
MASK = 2**64 - 1


class History:
    """Log of lookup events and of loads, and every question that a policy may ask about them."""

    def __init__(self, model: Model) -> None:
        self.plan = event_plan(model)
        self.n_events = 0
        self.tick = 0
        self.events: list[list[dict]] = [[] for _ in range(model.n_layers)]  # per layer
        self.loads: list[dict] = []

    def record(self, model: Model, pass_: OraclePass, layer: int) -> None:
        """Log one lookup event; its tokens take the next ticks."""
        self.n_events += 1
        accepted = model.accepted(pass_, layer)
        in_order = [expert for expert in model.demanded(pass_, layer) if expert in accepted]
        self.events[layer].append(
            {
                "tokens": model.kept(pass_, layer)[: pass_.n_kept],
                "sources": model.kept(pass_, layer - 1)[: pass_.n_kept] if layer > 0 else None,
                "demanded": accepted,
                "recent": in_order if pass_.is_decode else list(dict.fromkeys(model.kept(pass_, layer)[-1])),
                "scores": model.event_scores(pass_, layer),
                "first_tick": self.tick + 1,
            }
        )
        self.tick += pass_.n_kept

    def record_load(self, layer: int, expert: int, *, is_touch: bool) -> None:
        """Log that an expert was given a slot now, and whether that counts as being selected."""
        self.loads.append(
            {
                "key": (layer, expert),
                "tick": self.tick,
                "visit": self.visits(layer),
                "is_touch": is_touch,
            }
        )

    def visits(self, layer: int) -> int:
        """Count the events of a layer so far."""
        return len(self.events[layer])

    def n_selected(self, layer: int, expert: int, window: int = NEVER) -> int:
        """In how many of the last `window` events the expert was demanded."""
        return sum(expert in event["demanded"] for event in self.events[layer][-window:])

    def ema(self, layer: int, expert: int, decay: float) -> float:
        """Average being demanded, from zero, one step per event of the layer."""
        value = 0.0
        for event in self.events[layer]:
            value = value * decay
            if expert in event["demanded"]:
                value = value + (1.0 - decay)
        return value

    def mrs(self, layer: int, expert: int, decay: float, top_p: int) -> float:
        """Average the expert's score over the events of the layer, as 0 where it was not among the top p."""
        value = 0.0
        for event in self.events[layer]:
            value = value * decay
            if expert in _best(dict(enumerate(event["scores"])))[:top_p]:
                value = value + (1.0 - decay) * event["scores"][expert]
        return value

    def scores(self, layer: int) -> list[float] | None:
        """Return the most recent scores of a layer."""
        return self.events[layer][-1]["scores"] if self.events[layer] else None

    def age(self, layer: int, expert: int) -> int:
        """Events of the layer since the expert was demanded or loaded."""
        since = [load["visit"] for load in self.loads if load["key"] == (layer, expert)][-1:]
        for visit in range(self.visits(layer), 0, -1):
            if expert in self.events[layer][visit - 1]["demanded"]:
                since.append(visit)
                break
        return self.visits(layer) - max(since, default=0)

    def last_tick(self, layer: int, expert: int) -> int:
        """Tick of the last token that selected the expert, or of a later load that counts as one."""
        ticks = [load["tick"] for load in self.loads if load["key"] == (layer, expert) and load["is_touch"]][-1:]
        for event in reversed(self.events[layer]):
            if expert in event["demanded"]:
                last_token = max(i for i, ids in enumerate(event["tokens"]) if expert in ids)
                ticks.append(event["first_tick"] + last_token)
                break
        return max(ticks, default=0)

    def loaded_tick(self, layer: int, expert: int) -> int:
        """Tick of the last load, 0 for what was never loaded or was there at the start."""
        return next((load["tick"] for load in reversed(self.loads) if load["key"] == (layer, expert)), 0)

    def next_use(self, layer: int, expert: int) -> int:
        """Return the number of the next event that demands the expert."""
        for number in range(self.n_events + 1, len(self.plan) + 1):
            event_layer, demanded = self.plan[number - 1]
            if event_layer == layer and expert in demanded:
                return number
        return NEVER


class KeepScores:
    """Keep scores of one decision; larger is kept.

    Parameters
    ----------
    residents : list of (layer, expert)
        All residents when the decision begins: what min and max of the `history` policy run over.
    current : int
        Layer whose event decides; the last layer when a pass begins.
    lookahead : (layer, scores) or None
        Scores that stand in for one layer's own in a prefetch decision.
    """

    def __init__(self, model, history, residents, current, *, is_prefetch=False, lookahead=None) -> None:
        self.model = model
        self.settings = model.settings
        self.history = history
        self.residents = residents
        self.current = current
        self.is_prefetch = is_prefetch
        self.lookahead = lookahead

    def of(self, key: tuple[int, int]) -> float:
        """Keep score of (layer, expert), resident or a candidate seen as if it were."""
        layer, expert = key
        log = self.history
        name = self.settings.eviction
        if name == "lru":
            return float(log.last_tick(layer, expert))
        if name == "fifo":
            return float(log.loaded_tick(layer, expert))
        if name == "lfu":
            return float(log.n_selected(layer, expert))
        if name == "lfu_window":
            return float(log.n_selected(layer, expert, self.settings.window))
        if name == "ema":
            return log.ema(layer, expert, self.settings.decay)
        if name == "mrs":
            top_p = self.settings.top_p if self.settings.top_p is not None else 2 * self.model.inp.top_k[layer]
            return log.mrs(layer, expert, self.settings.decay, top_p)
        if name == "lfru":
            return log.n_selected(layer, expert) / (log.age(layer, expert) + 1)
        if name == "least_stale":
            return self._least_stale(layer, expert)
        if name == "score":
            return self._score(layer, expert)
        if name == "random":
            return random_keep(self.settings.salt, log.n_events, layer, expert, is_prefetch=self.is_prefetch)
        if name in {"belady", "belady_bypass"}:
            return float(-log.next_use(layer, expert))
        if name == "history":
            return self._weighted_history(layer, expert)
        raise ValueError(f"unknown eviction policy {name!r}")

    def _least_stale(self, layer: int, expert: int) -> float:
        n_layers = self.model.n_layers
        distance = (layer - self.current) % n_layers or n_layers
        return float(-(self.history.age(layer, expert) * (n_layers + 1) + distance))

    def _score(self, layer: int, expert: int) -> float:
        if self.lookahead is not None and self.lookahead[0] == layer:
            return self.lookahead[1][expert]
        scores = self.history.scores(layer)
        return scores[expert] if scores is not None else 0.0

    def _weighted_history(self, layer: int, expert: int) -> float:
        window, decay = self.settings.window, self.settings.decay
        w_count, w_ema, w_score, w_age = self.settings.weights
        keep = 0.0
        if w_count != 0:
            keep = keep + w_count * self._normal(layer, expert, lambda e: self.history.n_selected(layer, e, window))
        if w_ema != 0:
            keep = keep + w_ema * self._normal(layer, expert, lambda e: self.history.ema(layer, e, decay))
        if w_score != 0:
            keep = keep + w_score * self._normal(layer, expert, lambda e: self._score(layer, e))
        if w_age != 0:
            keep = keep - w_age * self._normal(layer, expert, lambda e: self.history.age(layer, e))
        return keep

    def _normal(self, layer, expert, component) -> float:
        values = [component(e) for resident_layer, e in self.residents if resident_layer == layer]
        if not values or min(values) == max(values):
            return 0.0
        return (component(expert) - min(values)) / (max(values) - min(values))


def random_keep(salt: int, event: int, layer: int, expert: int, *, is_prefetch: bool) -> float:
    """Keep score that depends on nothing but its arguments, on 64-bit arithmetic."""
    x = salt + 0x9E3779B97F4A7C15 * (event * 2 + int(is_prefetch) + 1)
    x += 0xBF58476D1CE4E5B9 * (layer + 1) + 0x94D049BB133111EB * (expert + 1)
    x &= MASK
    x ^= x >> 30
    x = (x * 0xBF58476D1CE4E5B9) & MASK
    x ^= x >> 27
    x = (x * 0x94D049BB133111EB) & MASK
    x ^= x >> 31
    return float(x >> 11)


def stand_ins(model: Model, pass_: OraclePass, layer: int, misses: list[int], free: set[int]) -> dict[int, int]:
    """Which free resident serves which miss: in demand order, the best one left for every miss near the boundary."""
    scores = model.event_scores(pass_, layer)
    chosen: dict[int, int] = {}
    for expert in misses:
        left = free - set(chosen.values())
        if left and model.gap(pass_, layer, expert) <= model.settings.alpha:
            chosen[expert] = min(left, key=lambda e: (-scores[e], e))
    return chosen


def predict(model: Model, history: History, pass_: OraclePass, target: int) -> list[int]:
    """Experts expected at layer `target`, best first, before slots and limits are looked at."""
    settings = model.settings
    if model.inp.routing[target] == "hash":
        return model.demanded(pass_, target)
    width = settings.width if settings.width is not None else model.inp.top_k[target] * pass_.n_tokens
    experts = range(model.inp.n_experts[target])
    if settings.predictor == "oracle":
        return model.demanded(pass_, target)[:width]
    if settings.predictor == "previous_token":
        return history.events[target][-1]["recent"][:width] if history.events[target] else []
    if settings.predictor == "lookahead":
        scores = model.lookahead(pass_, target)
        return _best(dict(zip(experts, scores, strict=True)))[:width] if scores is not None else []
    if settings.predictor == "popularity":
        counts = {expert: history.n_selected(target, expert) for expert in experts}
    elif settings.predictor == "coupling":
        counts = _coupling(model, history, pass_, target)
    else:
        raise ValueError(f"unknown predictor {settings.predictor!r}")
    return _best({expert: count for expert, count in counts.items() if count > 0})[:width]


def _best(scores: dict[int, float]) -> list[int]:
    return sorted(scores, key=lambda expert: (-scores[expert], expert))


def _coupling(model: Model, history: History, pass_: OraclePass, target: int) -> dict[int, float]:
    """How often each expert followed the experts now demanded one layer before, as a sum of shares."""
    steps = [
        (set(sources), set(selected))
        for event in history.events[target]
        for sources, selected in zip(event["sources"], event["tokens"], strict=True)
    ]
    totals = dict.fromkeys(range(model.inp.n_experts[target]), 0.0)
    for source in model.demanded(pass_, target - 1):
        followed = [selected for sources, selected in steps if source in sources]
        for expert in totals:
            if followed:
                totals[expert] = totals[expert] + sum(expert in selected for selected in followed) / len(followed)
    return totals
