"""Pictures of executed runs: what they show, and the same bytes for the same numbers."""

from pathlib import Path

from matplotlib.colors import to_hex

from moesim.plots import save_figure
from moesim.plots.divergence import DivergenceLine, draw_divergence
from moesim.plots.style import VERMILION
from moesim.plots.validation import ComparedLatency, ComparedRun, draw_validation

RUNS = (
    ComparedRun("_near", ComparedLatency(40e6, 39e6, 42e6, 41e6), None, {"compute": -0.01, "stall": 0.035}, 1.0, True),
    ComparedRun("far", ComparedLatency(80e6, 80e6, 80e6, 60e6), None, {"compute": -0.2, "stall": -0.05}, 0.7, False),
)
LINE = DivergenceLine("8 slots", (0.01, 0.1, float("inf")), (0.01, 0.2, 1.0), (0.05, 0.6, 3.0), (0.9, 0.7, 0.4),
                      (0.1, 0.4, 0.9), (0.11, 0.38, 0.95))  # fmt: skip


def test_validation_shows_latencies_terms_and_agreement() -> None:
    """Points stand at measured and predicted times, bars add up by side, and a run that decides otherwise is marked."""
    tpot, ttft, terms, agreement = draw_validation(RUNS, "note").axes
    points = tpot.containers[0].lines[0]
    assert list(points.get_xdata()) == [40.0, 80.0]
    assert list(points.get_ydata()) == [41.0, 60.0]
    assert [text.get_text() for text in ttft.texts] == ["no TTFT"]
    widths = [[round(bar.get_width(), 6) for bar in bars] for bars in terms.containers]
    starts = [[round(bar.get_x(), 6) for bar in bars] for bars in terms.containers]
    assert widths == [[-1.0, -20.0], [3.5, -5.0]]
    assert starts == [[0.0, 0.0], [0.0, -20.0]]
    assert [text.get_text() for text in terms.get_yticklabels()] == ["_near", "far"]
    assert [round(float(value), 6) for value in terms.lines[0].get_xdata()] == [2.5, -25.0]
    assert [to_hex(line.get_color()).upper() == VERMILION for line in agreement.lines] == [False, True]
    assert agreement.get_title(loc="left") == "decisions equal:\n1 of 2"
    low, high = agreement.get_xlim()
    assert low < 70
    assert high > 100


def test_divergence_shows_margins_and_the_proxy() -> None:
    """Divergence and agreement stand over the margins, divergence and the run's own share over the simulated share."""
    kl, argmax, by_weight, weights = draw_divergence([LINE], "softmax", "note").axes
    assert [tuple(line.get_ydata()) for line in kl.lines] == [LINE.kl, LINE.kl_p95]
    assert [text.get_text() for text in kl.get_xticklabels()] == ["0.01", "0.1", "inf"]
    assert list(argmax.lines[0].get_ydata()) == [90.0, 70.0, 40.0]
    assert list(by_weight.lines[0].get_xdata()) == [10.0, 40.0, 90.0]
    assert list(weights.lines[0].get_ydata()) == [11.0, 38.0, 95.0]


def test_pictures_are_the_same_bytes(tmp_path: Path) -> None:
    """Drawing twice gives the same files."""
    for name, draw in (
        ("validation", lambda: draw_validation(RUNS, "note")),
        ("divergence", lambda: draw_divergence([LINE], "softmax", "note")),
    ):
        first, second = (save_figure(draw(), tmp_path / f"{name}{number}") for number in range(2))
        assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
        assert first[0].stat().st_size > 10_000
