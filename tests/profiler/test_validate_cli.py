"""``moesim-profiler validate`` from files to a report, and what substitution does to the next token."""

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="executing needs torch")
pytest.importorskip("transformers", reason="executing needs transformers")

from moesim.errors import ConfigError
from moesim.specs import load_device
from profiler.accel import CpuDevice
from profiler.cli.main import run
from profiler.record.prompts import Request
from profiler.validate.divergence import Divergence, _compare, measure_divergence, taught
from tests.profiler.executor_helpers import recorder_of, scenario_of
from tests.profiler.recording_helpers import PROMPTS, save_config, save_prompts

SCENARIO = """
device = "h200"
cache.slots = 3
prefill.mode = "selective"
[link]
bandwidth = "1 GB/s"
[compute]
dense_ns = 0
attention_ns = 500_000
router_ns = 500_000
shared_ns = 0
expert_ns = 200_000
head_ns = 500_000
kernel_launch_ns = 0
[[variants]]
name = "lru"
[[variants]]
name = "ema, ahead"
eviction.policy = "ema"
prefetch = { predictor = "lookahead", depth = 1, rule = "fixed" }
"""


def _files(folder: Path, scenario: str = SCENARIO) -> list[str]:
    """Write scenario, model and prompts; give the words of a call."""
    (folder / "scenario.toml").write_text(scenario)
    config = save_config(folder, "olmoe")
    prompts = save_prompts(folder, [{"tokens": list(tokens)} for tokens in PROMPTS])
    return ["validate", str(folder / "scenario.toml"), "--model", str(config), "--prompts", str(prompts),
            "--out", str(folder / "out"), "--new-tokens", "4"]  # fmt: skip


def test_paced_validation_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables, plots and JSON hold both configurations, the machine, and errors that are those of the repeats."""
    assert run([*_files(tmp_path), "--paced", "--repeats", "2", "--largest-lag-ms", "50", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "out" / "validation.json").read_text()) == report
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "validation.json", "validation.md", "validation.png", "validation.svg"
    }  # fmt: skip
    assert report["overall"]["is_exact"]
    assert report["device_file"] is None
    assert {"device", "n_cores", "load", "torch"} <= report["machine"].keys()
    names = [item["name"] for item in report["configurations"]]
    assert names == ["lru", "ema, ahead"]
    page = (tmp_path / "out" / "validation.md").read_text()
    assert all(f"| {name} |" in page for name in names)
    for item in report["configurations"]:
        measured = [repeat["measured"]["tpot_ns"] for repeat in item["repeats"]]
        assert len(measured) == 2
        assert item["tpot"]["lowest_ns"] == min(measured)
        # Two layers of three stages and a head cannot be faster.
        assert min(measured) > 2.5e6


def test_unpaced_validation_predicts_from_a_device_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a device file nothing is calibrated, the file's numbers are used, and traces stay where they are wanted."""
    device = load_device("rtx-4090")
    words = [*_files(tmp_path), "--repeats", "1", "--keep-traces", "--limit", "1", "--set", "cache.slots=4"]
    assert run([*words, "--device-file", "rtx-4090", "--set", "link.launch_overhead_ns=1000"]) == 0
    printed = capsys.readouterr().out
    assert "every decision is the replay's" in printed.replace("\n", " ")
    report = json.loads((tmp_path / "out" / "validation.json").read_text())
    assert {item["settings"]["device"] for item in report["configurations"]} == {device.name}
    assert {item["settings"]["cache"]["slots"] for item in report["configurations"]} == {4}
    assert [path.name for path in sorted((tmp_path / "out" / "traces").iterdir())] == ["00.parquet", "01.parquet"]


@pytest.mark.slow
def test_unpaced_validation_calibrates_first(tmp_path: Path) -> None:
    """Without a device file the device is measured into one, which the predictions then use."""
    assert run([*_files(tmp_path), "--repeats", "1", "--quick", "--limit", "1"]) == 0
    report = json.loads((tmp_path / "out" / "validation.json").read_text())
    assert report["device_file"] == str(tmp_path / "out" / "device.toml")
    assert load_device(report["device_file"]).kind == "cpu"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("eviction.policy=belady",), "scenario 'lru': eviction.policy = 'belady' reads the future"),
        (("cache.slots=-1",), "cache.slots"),
        (("link.bandwidth=1 parsec",), "bandwidth"),
    ],
)
def test_what_cannot_be_executed_is_said_first(
    change: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A setting that is wrong or needs the future ends the call in one line, before anything is loaded or written."""
    assert run([*_files(tmp_path), *(word for text in change for word in ("--set", text))]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def divergences(tmp_path_factory: pytest.TempPathFactory) -> tuple[Divergence, ...]:
    """Measure a tiny random model in two caches, under a small margin and a large one."""
    texts = taught([Request(number, (*tokens, 4, 9, 30), 0) for number, tokens in enumerate(PROMPTS)], 3, 6)
    scenarios = [scenario_of(cache={"slots": slots}, prefill={"mode": "skip"}) for slots in (2, 4)]
    with CpuDevice() as device:
        folder = tmp_path_factory.mktemp("divergence")
        return measure_divergence(recorder_of("olmoe"), device, texts, scenarios, (0.01, 1.0), folder)


def test_divergence_grows_with_the_margin(divergences: tuple[Divergence, ...]) -> None:
    """Without substitution nothing differs, to the bit; a wider margin serves more and moves the next token further."""
    for slots in (2, 4):
        off, little, much = (item for item in divergences if item.slots == slots)
        assert (off.alpha, off.kl_mean, off.kl_p95, off.argmax_frac) == (None, 0.0, 0.0, 1.0)
        assert off.predicted == off.executed
        assert off.executed.n_substituted == 0
        assert 0 < little.kl_mean < much.kl_mean
        assert little.executed.n_substituted < much.executed.n_substituted
        assert 0 < little.predicted.stand_in_weight_frac < much.predicted.stand_in_weight_frac <= 1
        assert much.argmax_frac <= 1
        assert off.n_tokens == sum(min(6, len(tokens)) - 1 for tokens in PROMPTS)
    # The replayed trace is the whole model's, whose later routing no stand-in has changed.
    assert any(item.predicted != item.executed for item in divergences)


def test_divergence_is_that_of_the_logits() -> None:
    """The divergence of known distributions is the sum of p log(p / q); the first position is left out."""
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    left, right = (torch.tensor(np.log(np.stack([[0.2, 0.2, 0.6], values]))) for values in (p, q))
    kl, same = _compare([left], [right])
    assert kl == pytest.approx([float((p * np.log(p / q)).sum())])
    assert same.tolist() == [False]


def test_answers_are_forced() -> None:
    """Texts are cut into prompt and answer, and one too short to be answered is refused."""
    one = taught([Request(3, tuple(range(10)), 0, "code")], 4, 3)[0]
    assert (one.tokens, one.answer, one.new_tokens, one.domain) == ((0, 1, 2, 3), (4, 5, 6), 3, "code")
    with pytest.raises(ConfigError, match="request 3: its text has 5 tokens; needed: at least 6"):
        taught([Request(3, tuple(range(5)), 0)], 4, 3)
