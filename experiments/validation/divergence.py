"""Measure what substitution does to the next token of the small trained model: table, numbers and picture.

Run from the repository's root: ``python experiments/validation/divergence.py --out DIR``.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from moesim.files import write_text  # noqa: E402
from moesim.plots import save_figure  # noqa: E402
from moesim.plots.divergence import DivergenceLine, draw_divergence  # noqa: E402
from moesim.scenario import Scenario, build_scenario  # noqa: E402
from profiler.accel import open_device  # noqa: E402
from profiler.record.recording import prepare  # noqa: E402
from profiler.record.settings import RecordSettings  # noqa: E402
from profiler.validate.divergence import Divergence, measure_divergence, taught  # noqa: E402
from profiler.validate.machine import describe  # noqa: E402

SLOTS = (8, 16, 32)
ALPHAS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
PROMPT_TOKENS = 8
HEADINGS = (
    "slots", "alpha", "KL mean, nats", "KL p95", "same argmax %", "stand-ins per token",
    "weight of stand-ins %: simulated", "executed", "score given up per token: simulated", "executed",
)  # fmt: skip


def scenario_of(slots: int) -> Scenario:
    """Give a cache whose link is so fast that only decisions count; prompts run beside it, on all experts."""
    fields = {
        "name": f"{slots} slots", "trace": "recorded while running", "model": "tiny-moe", "device": "rtx-4090",
        "cache": {"slots": slots}, "prefill": {"mode": "skip"}, "link": {"bandwidth": "100 GB/s"},
    }  # fmt: skip
    return build_scenario(fields, "divergence.py")


def lines_of(found: Sequence[Divergence]) -> list[DivergenceLine]:
    """Put the points of each cache size together."""
    lines = []
    for slots in dict.fromkeys(item.slots for item in found):
        own = [item for item in found if item.slots == slots and item.alpha is not None]
        lines.append(
            DivergenceLine(
                name=f"{slots} slots",
                alphas=tuple(item.alpha for item in own if item.alpha is not None),
                kl=tuple(item.kl_mean for item in own),
                kl_p95=tuple(item.kl_p95 for item in own),
                argmax_frac=tuple(item.argmax_frac for item in own),
                predicted_weight=tuple(item.predicted.stand_in_weight_frac for item in own),
                executed_weight=tuple(item.executed.stand_in_weight_frac for item in own),
            )
        )
    return lines


def table_of(found: Sequence[Divergence], note: str) -> str:
    """Write the points as a page."""
    rows = [
        (
            str(item.slots), "off" if item.alpha is None else f"{item.alpha:g}", f"{item.kl_mean:.4f}",
            f"{item.kl_p95:.4f}", f"{100 * item.argmax_frac:.1f}", f"{item.executed.n_substituted:.2f}",
            f"{100 * item.predicted.stand_in_weight_frac:.1f}", f"{100 * item.executed.stand_in_weight_frac:.1f}",
            f"{item.predicted.score_given_up:.3f}", f"{item.executed.score_given_up:.3f}",
        )
        for item in found
    ]  # fmt: skip
    lines = [HEADINGS, ("---",) * len(HEADINGS), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"# Substitution and the next token\n\n{note}\n\n{table}\n"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for divergence.json, .md, .png and .svg")
    parser.add_argument("--tokens", type=int, default=24, help="most tokens of each text that are compared")
    parser.add_argument("--limit", type=int, default=None, help="use the first so many texts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = RecordSettings.of(
        model=ROOT / "tests" / "data" / "tiny_moe", prompts=ROOT / "experiments" / "hardware" / "prompts.jsonl",
        out=options.out, ignore_eos=True, limit=options.limit,
    )  # fmt: skip
    recorder, texts = prepare(settings)
    requests = taught(texts, PROMPT_TOKENS, options.tokens)
    scenarios = [scenario_of(slots) for slots in SLOTS]
    with open_device("cpu") as device, tempfile.TemporaryDirectory() as folder:
        machine = describe(device)
        found = measure_divergence(recorder, device, requests, scenarios, ALPHAS, Path(folder))
    note = (
        f"tests/data/tiny_moe, {len(requests)} texts of experiments/hardware/prompts.jsonl, {found[0].n_tokens} decode "
        f"positions with the text forced; LRU, prompts of {PROMPT_TOKENS} tokens on all experts; reference: the whole "
        f"model; torch {machine['torch']}, transformers {machine['transformers']}"
    )
    save_figure(draw_divergence(lines_of(found), "softmax", note), options.out / "divergence")
    write_text(options.out / "divergence.md", table_of(found, note))
    points = [asdict(item) | {"alpha": None if item.alpha is None else f"{item.alpha:g}"} for item in found]
    write_text(options.out / "divergence.json", json.dumps({"machine": machine, "points": points}, indent=1) + "\n")


if __name__ == "__main__":
    main()
