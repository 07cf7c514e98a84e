"""Prompts stage, share and leave the caches as worked out by hand, on every backend."""

import pytest

from moesim.errors import UnsupportedScenarioError
from tests.bridge import run_case
from tests.contract.case_results import cells, column, copied, sums
from tests.oracle_builders import case, decode, prefill


def test_c43_prefill_leaves_the_cache(backend):
    """Staging brings whole layers and leaves the decode cache as it was."""
    prompt = prefill(0, *[[[t % 8, (t + 1) % 8]] * 4 for t in range(20)])
    inp = case(
        [prompt, decode(1, [[0, 1]] * 4)], n_experts=[8] * 4, top_k=[2] * 4, slots=[2] * 4, warm_start="lowest_id",
        prefill="auto", expert_bytes=10,
    )  # fmt: skip
    result = run_case(inp, backend)
    assert copied(result, "kind", "layer", "n_bytes") == [("staging", layer, 80) for layer in range(4)]
    assert sums(result, "n_hits", "n_lookups", phase="decode") == (8, 8)
    assert sums(result, "n_lookups", "n_selections", phase="prefill") == (0, 0)
    assert sums(result, "demand_bytes", phase="prefill") == (4 * 8 * 10,)


@pytest.mark.parametrize(("n_tokens", "n_staged"), [(1, 0), (2, 1), (3, 2), (4, 2)])
def test_c43_threshold_of_each_layer(backend, n_tokens, n_staged):
    """A layer is staged from floor(slots / top-k) prompt tokens on, each layer by its own slots."""
    prompt = prefill(0, *[[[token % 4, 4 + token]] * 2 for token in range(n_tokens)])
    inp = case([prompt], n_experts=[8, 8], top_k=[2, 2], slots=[5, 7], prefill="auto")
    result = run_case(inp, backend)
    assert [kind for (kind,) in copied(result, "kind")].count("staging") == n_staged
    assert [n_lookups == 0 for n_lookups in column(result, "n_lookups")] == [n_staged > 0, n_staged > 1]


def test_c44_one_copy_per_expert_and_chunk(backend):
    """A selective prompt loads each expert once per chunk, however its tokens alternate."""
    experts = (0, 1, 2, 3, 0, 1, 2, 3)
    one_chunk = [prefill(0, *[[[expert]] for expert in experts])]
    by_token = [prefill(step, [[expert]]) for step, expert in enumerate(experts)]
    shape = {"n_experts": [4], "top_k": [1], "slots": [2], "prefill": "selective"}
    assert sums(run_case(case(one_chunk, **shape), backend), "n_selections", "n_misses", "n_transient") == (8, 4, 2)
    assert sums(run_case(case(by_token, **shape), backend), "n_selections", "n_misses", "n_transient") == (8, 8, 0)


@pytest.mark.parametrize(("experts", "misses"), [((0, 1, 2, 0), [3, 1, 0]), ((0, 1, 2), [3, 1, 1])])
def test_c45_prompt_tail(backend, experts, misses):
    """Every touch of a prompt's token refreshes recency, not only the first."""
    passes = [prefill(0, *[[[expert]] for expert in experts]), decode(1, [[3]]), decode(2, [[0]])]
    result = run_case(case(passes, n_experts=[4], top_k=[1], slots=[3], prefill="selective"), backend)
    assert column(result, "n_misses") == misses


@pytest.mark.parametrize(
    ("n_layers", "copy_ns", "compute_ns", "end_ns", "landings"),
    [
        (4, 10, 4, 44, [10, 20, 30, 40]),
        (4, 4, 10, 44, [4, 8, 18, 28]),
        (3, 10, 4, 34, [10, 20, 30]),
        (1, 10, 4, 14, [10]),
    ],
)
def test_c46_two_buffers(backend, n_layers, copy_ns, compute_ns, end_ns, landings):
    """Two staging buffers overlap copies with compute, one layer ahead at most."""
    costs = {"staging_transfer_ns": copy_ns, "expert_ns": compute_ns}
    shape = {"n_experts": [2] * n_layers, "top_k": [1] * n_layers, "slots": [1] * n_layers}
    result = run_case(case([prefill(0, [[0]] * n_layers)], **shape, prefill="staging", costs=costs), backend)
    assert result.requests["first_token_ns"].tolist() == [end_ns]
    assert [landed for (landed,) in copied(result, "landed_ns")] == landings


def test_c46_bytes_of_a_full_layer(backend):
    """A staged layer moves all its experts: 3.4226 GB for 256 experts of 12.75 MiB."""
    inp = case([prefill(0, [[0]])], n_experts=[256], top_k=[1], slots=[84], prefill="staging", expert_bytes=13_369_344)
    result = run_case(inp, backend)
    assert copied(result, "n_bytes") == [(3_422_552_064,)]
    assert result.requests["copied_bytes"].tolist() == [3_422_552_064]


def test_c47_stale_staging(backend):
    """What a staging buffer held is no hit in the decode that follows."""
    passes = [prefill(0, [[0]] * 3), decode(1, [[0]] * 3)]
    inp = case(passes, n_experts=[2] * 3, top_k=[1] * 3, slots=[1] * 3, prefill="staging")
    assert sums(run_case(inp, backend), "n_misses", "n_hits", phase="decode") == (3, 0)


def test_staging_teaches_the_policies_nothing(backend):
    """A staged prompt touches no history: the counts that evict are those of the decode alone."""
    prompt = [prefill(step, *[[[0]]] * 4) for step in (0, 1)]
    passes = [*prompt, *[decode(step, [[expert]]) for step, expert in enumerate((0, 1, 1, 2, 1), start=2)]]
    inp = case(passes, n_experts=[3], top_k=[1], slots=[2], prefill="auto", eviction="lfu")
    assert column(run_case(inp, backend), "n_misses") == [0, 0, 1, 1, 0, 1, 0]


def test_chunks_and_layers_mix(backend):
    """A chunked prompt may stage one layer and look the other one up, chunk by chunk."""
    chunks = [
        prefill(0, [[0, 1]] * 2, [[0, 2]] * 2, [[0, 3]] * 2),
        prefill(1, [[0, 4]] * 2, [[0, 1]] * 2, [[5, 6]] * 2),
    ]
    result = run_case(case(chunks, n_experts=[8, 8], top_k=[2, 2], slots=[7, 8], prefill="auto"), backend)
    assert cells(result, "step", "layer", "n_lookups", "n_misses") == [
        (0, 0, 0, 0),
        (0, 1, 4, 4),
        (1, 0, 0, 0),
        (1, 1, 5, 3),
    ]
    kinds = [kind for (kind,) in copied(result, "kind")]
    assert (kinds.count("staging"), kinds.count("demand")) == (2, 7)


@pytest.mark.parametrize(
    ("n_experts", "order", "first_token_ns"),
    [(4, "overlapped", 20 + 4 * 3 + 7), (4, "grouped", 20 + 1 + 4 * 2 + 7), (8, "overlapped", 20 + 6 * 3 + 7)],
)
def test_unrecorded_prompt(backend, n_experts, order, first_token_ns):
    """A prompt without rows is staged, its tokens spread over the experts, or refused where its rows are needed."""
    costs = {"staging_transfer_ns": 20, "expert_ns": 2, "kernel_launch_ns": 1, "head_ns": 7}
    shape = {"n_experts": [n_experts], "top_k": [2], "slots": [2], "prompt_tokens": 3, "costs": costs}
    result = run_case(case([decode(5, [[0, 1]])], prefill="auto", experts_order=order, **shape), backend)
    assert result.requests["first_token_ns"].tolist() == [first_token_ns]
    assert cells(result, "step", "phase") == [(4, "prefill"), (5, "decode")]
    with pytest.raises(UnsupportedScenarioError, match="has not recorded its routing"):
        run_case(case([decode(5, [[0, 1]])], prefill="selective", **shape), backend)
