"""Short ways to write an oracle case by hand."""

from tests.oracle_input import OracleCosts, OracleInput, OraclePass, OracleRequest, OracleSettings


def decode(step: int, *tokens: list[list[int]], **columns: list) -> OraclePass:
    """Return a decode pass; a token is a list of rows, one per layer."""
    return OraclePass(step, is_decode=True, n_tokens=len(tokens), rows=list(tokens), **columns)


def prefill(step: int, *tokens: list[list[int]], **columns: list) -> OraclePass:
    """Return a prefill pass; a token is a list of rows, one per layer."""
    return OraclePass(step, is_decode=False, n_tokens=len(tokens), rows=list(tokens), **columns)


def one_layer(*rows: list[int]) -> list[OraclePass]:
    """Return decode passes of one token on a model of one layer."""
    return [decode(step, [row]) for step, row in enumerate(rows)]


def same_in_all(n_layers: int, *rows: list[int]) -> list[OraclePass]:
    """Return decode passes of one token that select the same experts in every layer."""
    return [decode(step, [row] * n_layers) for step, row in enumerate(rows)]


def case(
    passes: list[OraclePass],
    *,
    n_experts: list[int],
    top_k: list[int],
    expert_bytes: int | list[int] = 1,
    routing: list[str] | None = None,
    n_identity: int = 0,
    prompt_tokens: int | None = None,
    costs: dict | None = None,
    **settings,
) -> OracleInput:
    """Return a run of one request; a single number among `costs` holds for all layers, what is not named costs 0."""
    n_layers = len(n_experts)
    per_layer = (
        "dense_ns",
        "attention_ns",
        "router_ns",
        "shared_ns",
        "expert_ns",
        "transfer_ns",
        "staging_transfer_ns",
    )
    durations = {name: 1 if "transfer" in name else 0 for name in per_layer} | (costs or {})
    for name in per_layer:
        if isinstance(durations[name], int):
            durations[name] = [durations[name]] * n_layers
    return OracleInput(
        n_experts=n_experts,
        top_k=top_k,
        routing=routing or ["topk"] * n_layers,
        n_identity=n_identity,
        expert_bytes=[expert_bytes] * n_layers if isinstance(expert_bytes, int) else expert_bytes,
        requests=[OracleRequest(0, prompt_tokens, passes)],
        settings=OracleSettings(**settings),
        costs=OracleCosts(**durations),
    )


def total(rows: list[dict], name: str, **where: object) -> int:
    """Sum a column over the rows whose other columns have the given values."""
    return sum(row[name] for row in rows if all(row[key] == value for key, value in where.items()))
