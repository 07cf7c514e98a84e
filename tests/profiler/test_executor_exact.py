"""Executed runs compute what the whole model computes, whatever is where and whenever it arrives."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from moesim.policies.log import Outcome
from profiler.executor.model import layouts_of
from profiler.record.prompts import Request
from profiler.record.recording import prepare
from profiler.record.settings import RecordSettings
from tests.profiler.executor_helpers import LINK, REQUESTS, recorder_of, run_on, scenario_of, tiny_folder, whole_model
from tests.profiler.recording_helpers import recorder_for, save_prompts
from tests.profiler.tiny_families import tiny_model

AHEAD = {"predictor": "lookahead", "depth": 2, "rule": "fixed"}


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_offloaded_model_gives_the_same_bits(family: str, tmp_path: Path) -> None:
    """Tokens and logits equal those of the library's eager loop with all experts in place, bit for bit."""
    recorder = recorder_of(family)
    expected = whole_model(recorder)
    executed = run_on(recorder, scenario_of(prefetch=AHEAD), tmp_path, keep_logits=True)
    for (tokens, logits), entry in zip(expected, executed.requests, strict=True):
        assert entry.tokens == tokens
        assert torch.equal(entry.logits, logits)


@pytest.mark.parametrize(
    "groups",
    [
        {"cache": {"slots": 0}, "prefill": {"mode": "selective"}},
        {"cache": {"slots": 8}, "prefill": {"mode": "selective"}},
        {"cache": {"slots": 2}, "prefill": {"mode": "staging"}, "prefetch": AHEAD},
        {"prefill": {"mode": "skip"}, "eviction": {"policy": "ema"}},
        {"link": LINK | {"bandwidth": "100 GB/s"}, "prefetch": AHEAD},
        {"link": LINK | {"bandwidth": "0.1 GB/s", "discipline": "fifo"}, "prefetch": AHEAD},
    ],
)  # fmt: skip
def test_values_do_not_depend_on_the_cache(groups: dict[str, Any], tmp_path: Path) -> None:
    """Slots, prompts' path, link and policies change when experts arrive, and no bit of what is computed."""
    recorder = recorder_of("olmoe")
    expected = whole_model(recorder)
    executed = run_on(recorder, scenario_of(**groups), tmp_path, keep_logits=True)
    for (tokens, logits), entry in zip(expected, executed.requests, strict=True):
        assert entry.tokens == tokens
        assert torch.equal(entry.logits, logits)


def test_trained_model_gives_the_same_bits(tmp_path: Path) -> None:
    """The small trained model, in half precision, generates the same text from slots."""
    prompts = save_prompts(tmp_path, [{"text": "def main(path):", "new_tokens": 8}, {"text": "The old king"}])
    settings = RecordSettings.of(model=tiny_folder(), prompts=prompts, out=tmp_path, new_tokens=6)
    recorder, requests = prepare(settings)
    expected = whole_model(recorder, requests)
    executed = run_on(recorder, scenario_of(cache={"slots": 8}, prefetch=AHEAD), tmp_path, requests, keep_logits=True)
    assert sum(len(tokens) for tokens, _ in expected) > 8
    for (tokens, logits), entry in zip(expected, executed.requests, strict=True):
        assert entry.tokens == tokens
        assert torch.equal(entry.logits, logits)


def test_tensors_lie_where_torch_would_put_them(tmp_path: Path) -> None:
    """An expert whose tensors have odd sizes gives the same bits: each of them begins at a full cache line."""
    model = tiny_model("gpt_oss", intermediate_size=36)
    recorder = recorder_for(model, "gpt_oss")
    expected = whole_model(recorder, REQUESTS[:1])
    layouts = layouts_of(recorder)
    assert all(part.offset % 64 == 0 for layout in layouts for part in layout.parts)
    assert any(part.n_bytes % 64 for layout in layouts for part in layout.parts)
    assert {layout.expert_bytes for layout in layouts} == {4 * (64 * 72 + 72 + 36 * 64 + 64)}
    executed = run_on(recorder, scenario_of(), tmp_path, REQUESTS[:1], keep_logits=True)
    assert torch.equal(executed.requests[0].logits, expected[0][1])


def test_stand_ins_take_the_weight_of_what_they_stand_for(tmp_path: Path) -> None:
    """With substitution the values are those of the whole model whose router had named the stand-ins."""
    request = Request(0, REQUESTS[0].tokens, 8)
    settings = {"substitution": {"alpha": float("inf")}, "cache": {"slots": 4}}
    executed = run_on(recorder_of("mixtral"), scenario_of(**settings), tmp_path, [request], keep_logits=True)
    entry = executed.requests[0]
    is_served = entry.log.outcome == Outcome.SUBSTITUTED
    assert is_served.sum() > 4
    recorder = recorder_of("mixtral")
    n_layers, calls = recorder.routers.n_layers, [0] * recorder.routers.n_layers

    def renamed(layer: int) -> Any:
        def hook(_module: Any, args: Any) -> Any:
            event = calls[layer] * n_layers + layer
            calls[layer] += 1
            ids = args[1].clone()
            for number in range(entry.lookups.offset[event], entry.lookups.offset[event + 1]):
                if is_served[number]:
                    ids[args[1] == int(entry.lookups.expert[number])] = int(entry.log.stand_in[number])
            return (args[0], ids, args[2])

        return hook

    for site in recorder.routers.sites:
        site.experts.register_forward_pre_hook(renamed(site.layer))
    ((tokens, logits),) = whole_model(recorder, [request])
    assert entry.tokens == tokens
    # The whole model adds up in the order of the stand-ins' ids.
    assert torch.allclose(entry.logits, logits, rtol=0, atol=1e-5)
