"""Measured compute times in a device file: how they are read between points, and when a run uses them."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from moesim.cost import ComputeCosts
from moesim.run import run_scenario
from moesim.scenario import Scenario
from moesim.specs import AttentionTimes, DeviceSpec, TimesByTokens, load_device, load_model

TRACE = Path(__file__).parents[2] / "traces" / "tiny_moe_trace_small.parquet"


def _table(**changes: Any) -> dict[str, Any]:
    """Give a measured table of tiny-moe."""
    return {
        "model": "tiny-moe",
        "source": "test",
        "dtype": "float32",
        "attention": [{"points": [[1, 16, 1_000], [1, 128, 2_000], [16, 16, 4_000]]}],
        "router": [{"points": [[1, 70]]}],
        "expert": [{"points": [[1, 500], [4, 800]]}],
        **changes,
    }


def _device(*tables: dict[str, Any]) -> DeviceSpec:
    """Give the laptop with measured tables."""
    return DeviceSpec.model_validate({**load_device("laptop-cpu").model_dump(), "compute": tables})


def _costs(device: DeviceSpec, model: str = "tiny-moe") -> ComputeCosts:
    """Give the cost model of a catalog model on a device."""
    spec = load_model(model)
    return ComputeCosts(spec, device, spec.n_layers, {})


@pytest.mark.parametrize(("n_tokens", "time_ns"), [(1, 500), (2, 600), (3, 700), (4, 800), (6, 1_000), (44, 4_800)])
def test_tokens_are_interpolated(n_tokens: int, time_ns: int) -> None:
    """Between points time is linear in the tokens, beyond the last it keeps its slope."""
    assert TimesByTokens.model_validate({"points": [[1, 500], [4, 800]]}).time_ns(n_tokens) == time_ns


def test_tokens_before_the_first_point() -> None:
    """Before the first point the time is that of the first; one point is constant."""
    assert TimesByTokens.model_validate({"points": [[4, 800], [8, 900]]}).time_ns(1) == 800
    assert TimesByTokens.model_validate({"points": [[4, 800]]}).time_ns(100) == 800


@pytest.mark.parametrize(
    ("n_tokens", "n_context", "time_ns"),
    [(1, 8, 1_000), (1, 72, 1_500), (1, 240, 3_000), (16, 16, 4_000), (6, 16, 2_000), (6, 128, 2_667), (31, 31, 6_866)],
)
def test_attention_is_interpolated(n_tokens: int, n_context: int, time_ns: int) -> None:
    """Attention is linear in the context within a row and in the tokens between rows."""
    times = AttentionTimes.model_validate({"points": [[1, 16, 1_000], [1, 128, 2_000], [16, 16, 4_000]]})
    assert times.time_ns(n_tokens, n_context) == time_ns


def test_longer_passes_never_get_shorter_beyond_the_points() -> None:
    """A row that noise made shorter than the one before does not pull later times down."""
    times = AttentionTimes.model_validate({"points": [[1, 16, 1_000], [2, 16, 900]]})
    assert times.time_ns(100, 100) == 900


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([[1, 5], [1, 6]], "counts must rise"),
        ([[0, 5]], "counts must rise"),
        ([[1, 5], [2, 4]], "times must not fall"),
        ([[1, 0]], "1 ns at least"),
        ([], "at least 1 item"),
    ],
)
def test_bad_token_points(points: list[list[int]], message: str) -> None:
    """Points out of order are refused."""
    with pytest.raises(ValidationError, match=message):
        TimesByTokens.model_validate({"points": points})


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([[4, 2, 5]], "need a context of at least as many"),
        ([[1, 4, 5], [2, 4, 6], [1, 8, 7]], "stand together"),
        ([[2, 4, 5], [1, 4, 6]], "tokens rising"),
        ([[1, 4, 5], [1, 8, 4]], "times must not fall"),
    ],
)
def test_bad_attention_points(points: list[list[int]], message: str) -> None:
    """Attention points out of order or impossible are refused."""
    with pytest.raises(ValidationError, match=message):
        AttentionTimes.model_validate({"points": points})


def test_a_model_is_measured_once() -> None:
    """Two tables for one model are refused."""
    with pytest.raises(ValidationError, match="tiny-moe, tiny-moe, allowed: each once"):
        _device(_table(), _table())


def test_costs_use_what_was_measured_for_the_model() -> None:
    """Attention, router and expert of the model come from its table; what the table lacks stays derived."""
    costs, derived = _costs(_device(_table())), _costs(load_device("laptop-cpu"))
    assert costs.gap_ns(3, ((1, 72),)) == 1_500
    assert costs.router_ns(7, 1) == 70
    assert costs.expert_ns(2, 2, 24_576) == 600
    assert costs.expert_ns(2, 0, 24_576) == 0
    assert costs.output_head_ns(((1, 72),), 1) == derived.output_head_ns(((1, 72),), 1)
    assert derived.expert_ns(2, 2, 24_576) != 600


def test_stated_durations_go_before_measured_ones() -> None:
    """What a scenario states replaces the device file's measurement."""
    spec = load_model("tiny-moe")
    stated = {"expert_ns": [9] * spec.n_layers}
    costs = ComputeCosts(spec, _device(_table()), spec.n_layers, stated)
    assert costs.expert_ns(0, 1, 24_576) == 9
    assert costs.router_ns(0, 1) == 70


def test_other_models_stay_derived() -> None:
    """A table under another model's name changes nothing."""
    device = _device(_table(model="olmoe-1b-7b"))
    assert _costs(device).expert_ns(0, 1, 24_576) == _costs(load_device("laptop-cpu")).expert_ns(0, 1, 24_576)


def test_measured_times_hold_for_layers_of_the_same_shape() -> None:
    """gpt-oss alternates two kinds of attention: each layer takes the entry of its own kind, or stays derived."""
    sliding, full = {"layer": 0, "points": [[1, 1, 100]]}, {"layer": 1, "points": [[1, 1, 300]]}
    both = _costs(_device(_table(model="gpt-oss-20b", attention=[sliding, full])), "gpt-oss-20b")
    assert [both.gap_ns(layer, ((1, 50),)) for layer in range(4)] == [100, 300, 100, 300]
    one = _costs(_device(_table(model="gpt-oss-20b", attention=[full])), "gpt-oss-20b")
    derived = _costs(load_device("laptop-cpu"), "gpt-oss-20b")
    assert one.gap_ns(2, ((1, 50),)) == derived.gap_ns(2, ((1, 50),))
    assert one.gap_ns(3, ((1, 50),)) == 300


def test_runs_say_that_times_were_measured(tmp_path: Path) -> None:
    """A run on a device with measured times uses them, and its provenance names the parts and the type."""
    path = tmp_path / "measured.toml"
    laptop = (Path(__file__).parents[2] / "moesim/specs/catalog/devices/laptop-cpu.toml").read_text()
    path.write_text(
        laptop + '\n[[compute]]\nmodel = "tiny-moe"\nsource = "test"\ndtype = "float32"\n'
        "[[compute.expert]]\npoints = [[1, 1_000_000]]\n"
    )
    runs = [
        run_scenario(
            Scenario.model_validate(
                {
                    "trace": str(TRACE),
                    "model": "tiny-moe",
                    "device": device,
                    "cache": {"slots": 64},
                    "prefill": {"mode": "skip"},
                    "compute": {"experts": "grouped"},
                }
            )
        )
        for device in (str(path), "laptop-cpu")
    ]
    measured, derived = (run.info["device_provenance"] for run in runs)
    assert measured["expert_ns"] == "measured in float32"
    assert "expert_ns" not in derived
    assert "router_ns" not in measured
    step = runs[0].steps["compute_ns"].min()
    # Eight layers of four experts, a millisecond each.
    assert 32_000_000 <= step < 34_000_000
