"""The oracle's blocks: which passes run when, with verify steps and batches, and when each request began and ended."""

from dataclasses import dataclass, replace

from tests.oracle_input import Model, OraclePass, OracleRequest


@dataclass(frozen=True)
class OracleBlock:
    """Passes of one request, or of several in lockstep: ``label`` is its number, or -1."""

    label: int
    passes: list[OraclePass]
    members: list[OracleRequest]
    begin: list[int]  # requests whose first passes these are
    end: list[int]  # requests whose last passes these are


def _verify_steps(request: OracleRequest, passes: list[OraclePass], depth: int) -> list[OraclePass]:
    """Cut one-token decode passes into steps of up to ``1 + depth`` tokens, as the request's accepted drafts say."""
    prompt = [p for p in passes if not p.is_decode]
    tokens = [p for p in passes if p.is_decode]
    steps = []
    done = 0
    for accepted in request.drafts or []:
        if done == len(tokens):
            break
        window = tokens[done : done + 1 + depth]
        produced = min(1 + accepted, len(window))
        merged = _merge(window, tokens[0].step + len(steps))
        steps.append(replace(merged, n_accepted=produced))
        done += produced
    return prompt + steps


def _merge(passes: list[OraclePass], step: int) -> OraclePass:
    """Put passes together into one: the accepted tokens of all, then the rejected ones of all."""

    def ordered(column: str):
        if getattr(passes[0], column) is None:
            return None
        kept = [value for p in passes for value in getattr(p, column)[: p.n_kept]]
        return kept + [value for p in passes for value in getattr(p, column)[p.n_kept :]]

    return OraclePass(
        step=step,
        is_decode=True,
        n_tokens=sum(p.n_tokens for p in passes),
        rows=ordered("rows"),
        weights=ordered("weights"),
        scores=ordered("scores"),
        lookahead=ordered("lookahead"),
        n_accepted=sum(p.n_kept for p in passes),
    )


def _passes(model: Model, request: OracleRequest) -> list[OraclePass]:
    passes = model.passes(request)
    depth = model.settings.mtp_depth
    return _verify_steps(request, passes, depth) if depth > 0 else passes


def blocks(model: Model) -> list[OracleBlock]:
    """Return everything that runs, in order: with a batch, every prompt alone, then decode passes until one ends."""
    queue = [(request, _passes(model, request)) for request in model.inp.requests]
    queue = [(request, passes) for request, passes in queue if passes]
    if model.settings.batch == 1:
        return [OracleBlock(r.request, passes, [r], [r.request], [r.request]) for r, passes in queue]
    result = []
    running: list[tuple[OracleRequest, list[OraclePass]]] = []
    begun: set[int] = set()
    n_shared = 0
    while queue or running:
        while queue and len(running) < model.settings.batch:
            request, passes = queue.pop(0)
            prompt = [p for p in passes if not p.is_decode]
            decode = passes[len(prompt) :]
            if prompt:
                end = [] if decode else [request.request]
                result.append(OracleBlock(request.request, prompt, [request], [request.request], end))
                begun.add(request.request)
            if decode:
                running.append((request, decode))
        if not running:
            break
        n_passes = min(len(decode) for _, decode in running)
        together = [[decode[i] for _, decode in running] for i in range(n_passes)]
        if len(running) == 1:
            label, merged = running[0][0].request, [own for (own,) in together]
        else:
            label, merged = -1, [_merge(group, n_shared + i) for i, group in enumerate(together)]
            n_shared += n_passes
        members = [request for request, _ in running]
        begin = [r.request for r in members if r.request not in begun]
        begun.update(begin)
        end = [r.request for r, decode in running if len(decode) == n_passes]
        result.append(OracleBlock(label, merged, members, begin, end))
        running = [(r, decode[n_passes:]) for r, decode in running if len(decode) > n_passes]
    return result


def event_plan(model: Model) -> list[tuple[int, set[int]]]:
    """Return the lookup events of the whole run in order, as (layer, demanded experts)."""
    return [
        (layer, set(model.demanded(pass_, layer)))
        for block in blocks(model)
        for pass_ in block.passes
        for layer in range(model.n_layers)
        if not model.is_staged(pass_, layer)
    ]


class RequestLog:
    """The table of requests, written down block by block."""

    def __init__(self, batch: int) -> None:
        self.free_ns = [0] * batch
        self.open: dict[int, dict] = {}
        self.done: dict[int, dict] = {}
        self.order: list[int] = []
        self.copies: list[dict] = []
        self.n_dropped = 0

    def add(self, block: OracleBlock, start_ns: int, end_ns: int, steps: list[dict], copies, n_dropped: int) -> None:
        """Write down one block that ran from start to end."""
        for request in block.members:
            if request.request in block.begin:
                self.order.append(request.request)
                self.open[request.request] = {
                    "request": request.request,
                    "prompt_tokens": request.prompt_tokens,
                    "n_output_tokens": 1 + sum(p.n_tokens for p in request.passes if p.is_decode),
                    "arrival_ns": self.free_ns.pop(0),
                    "start_ns": start_ns,
                    "first_token_ns": -1,
                    "decode_compute_ns": 0,
                }
        numbers = [request.request for request in block.members]
        for number, row in self.open.items():
            for step in steps:
                if number in numbers and step["phase"] == "prefill":
                    row["first_token_ns"] = step["end_ns"]
                else:
                    row["decode_compute_ns"] += step["compute_ns"]
        self.copies += copies
        self.n_dropped += n_dropped
        for number in block.end:
            self.done[number] = self.open.pop(number) | {
                "end_ns": end_ns,
                "link_busy_ns": sum(copy["landed_ns"] - copy["started_ns"] for copy in self.copies),
                "n_copies": len(self.copies),
                "copied_bytes": sum(copy["n_bytes"] for copy in self.copies),
                "n_dropped": self.n_dropped,
            }
            self.copies, self.n_dropped = [], 0
            self.free_ns.append(end_ns)

    def rows(self) -> list[dict]:
        """Return the requests in the order in which they began."""
        return [self.done[number] for number in self.order]
