"""``moesim-profiler record``: a model and prompts in, a trace out."""

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moesim.cli.output import check_writable, emit
from profiler.record.recording import Overhead, Recorder, Summary
from profiler.record.recording import record as run_recording
from profiler.record.settings import RecordSettings

_LINE_EVERY_S = 10.0


class Dtype(StrEnum):
    """Types of weights by name."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def record(
    model: Annotated[Path, typer.Argument(help="Folder of a model, or a config.json for random weights.")],
    prompts: Annotated[Path, typer.Option(help="Prompts: .txt, one a line, or .jsonl with text and domain.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the trace.")],
    new_tokens: Annotated[int, typer.Option(min=0, help="Tokens to generate per request.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Requests that run together.")] = 1,
    sample: Annotated[bool, typer.Option("--sample/--greedy", help="Draw tokens, or take the best.")] = False,
    temperature: Annotated[float, typer.Option(help="Of --sample.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Of --sample.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of --sample and of random weights.")] = 0,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Cut longer prompts to so many tokens.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-sequence token.")] = False,
    hidden_every: Annotated[
        int, typer.Option(min=0, metavar="N", help="Keep router inputs of every N-th position; 0: none.")
    ] = 0,
    lookahead: Annotated[
        bool, typer.Option("--lookahead/--no-lookahead", help="Record the next router on this layer's residual.")
    ] = True,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.")] = Dtype.AUTO,
    device: Annotated[str, typer.Option(help="A torch device, e.g. cuda:0 or npu:0.")] = "cpu",
    shard_requests: Annotated[int, typer.Option(min=1, help="Requests in a shard; a crash loses at most one.")] = 8,
    allow_repeats: Annotated[
        bool, typer.Option("--allow-repeats", help="Accept tokens that repeat the previous one's values everywhere.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted recording stopped.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Use the first N prompts.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model in the trace.")] = None,
    licence: Annotated[str, typer.Option(help="Licence of the trace.")] = "not stated",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Run a model on prompts and record its routers: scores, selections, weights, lookahead, tokens."""
    settings = RecordSettings.of(
        model=model,
        prompts=prompts,
        out=out,
        new_tokens=new_tokens,
        batch=batch,
        sampling="sample" if sample else "greedy",
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        prompt_tokens=prompt_tokens,
        ignore_eos=ignore_eos,
        hidden_every=hidden_every,
        lookahead=lookahead,
        dtype=dtype.value,
        device=device,
        shard_requests=shard_requests,
        allow_repeats=allow_repeats,
        limit=limit,
        name=name,
        licence=licence,
    )
    check_writable(out, "--out", is_folder=True)
    with Meter() as meter:
        summary = run_recording(settings, resume=resume, on_start=meter.start, on_token=meter.add)
    emit(_answer(settings, summary, meter), as_json)


class Meter:
    """Progress on stderr: a bar with tokens per second and the time left, or a line now and then without a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._is_terminal = console.is_terminal
        self._bar = Progress(
            TextColumn("recording"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]:.1f} tokens/s"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not self._is_terminal,
        )
        self._task: Any = None
        self._started_s = self._spoke_s = time.monotonic()
        self._before = self._total = 0
        self.n_tokens = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @property
    def tokens_per_s(self) -> float:
        """Speed of this run so far, writing included."""
        return self.n_tokens / max(time.monotonic() - self._started_s, 1e-9)

    def start(self, recorder: Recorder, done: int, total: int, overhead: Overhead | None) -> None:
        """Begin counting."""
        routers = recorder.routers
        line = (
            f"recording {recorder.loaded.name}: {routers.n_layers} MoE layers, router {routers.sites[0].router_name}, "
            f"scores {routers.rules[-1].words()}"
        )
        if overhead is not None:
            line += (
                f"; a decode step takes {overhead.with_s * 1e3:.1f} ms with recording, "
                f"{overhead.without_s * 1e3:.1f} ms without ({100 * overhead.fraction:+.0f} %)"
            )
        print(line, file=sys.stderr)
        self._before, self._total = done, total
        self._started_s = self._spoke_s = time.monotonic()
        self._task = self._bar.add_task("recording", total=total, completed=done, speed=0.0)

    def add(self, n_tokens: int) -> None:
        """Count tokens that went through the model."""
        self.n_tokens += n_tokens
        speed = self.tokens_per_s
        self._bar.update(self._task, completed=self._before + self.n_tokens, speed=speed)
        now = time.monotonic()
        if not self._is_terminal and now - self._spoke_s > _LINE_EVERY_S:
            self._spoke_s = now
            done = self._before + self.n_tokens
            left_s = (self._total - done) / speed
            print(f"{done} of at most {self._total} tokens, {speed:.1f} tokens/s, {left_s:.0f} s left", file=sys.stderr)


def _answer(settings: RecordSettings, summary: Summary, meter: Meter) -> dict[str, Any]:
    routers, overhead = summary.routers, summary.overhead
    return {
        "trace": str(settings.out),
        "n_requests": summary.n_requests,
        "n_recorded": summary.n_recorded,
        "n_shards": summary.n_shards,
        "n_tokens": summary.n_tokens,
        "n_rows": summary.n_rows,
        "tokens_per_s": meter.tokens_per_s if summary.n_tokens else None,
        "n_layers": routers.n_layers,
        "n_experts": sorted(set(routers.n_experts)),
        "top_k": sorted(set(routers.top_k)),
        "router": routers.sites[0].router_name,
        "scores": sorted({rule.words() for rule in routers.rules}),
        "lookahead": routers.lookahead_source() if settings.lookahead else None,
        "decode_step_ms": overhead.with_s * 1e3 if overhead else None,
        "decode_step_without_recording_ms": overhead.without_s * 1e3 if overhead else None,
        "recording_overhead_frac": overhead.fraction if overhead else None,
    }
