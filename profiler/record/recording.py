"""One recording from settings to a folder of shards."""

import hashlib
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moesim import __version__
from moesim.errors import ConfigError
from moesim.trace import ModelShape, Provenance, RequestMeta, TraceMeta, TraceWriter
from profiler.record.generate import Batch, Sampling, run_batch
from profiler.record.model import LoadedModel, load
from profiler.record.prompts import Request, read_prompts
from profiler.record.rows import RowMaker
from profiler.record.settings import RecordSettings
from profiler.record.shards import ShardFolder
from profiler.record.spool import Spool
from profiler.record.tap import RouterTap, Step
from profiler.routers.probe import RouterMap, understand
from profiler.routers.sites import Site

_PROBE_TOKENS = 12
_OVERHEAD_TOKENS = 9
_OVERHEAD_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds of a decode step without and with recording: the best median of several interleaved runs each."""

    without_s: float
    with_s: float

    @property
    def fraction(self) -> float:
        """Extra time of recording over the time without."""
        return self.with_s / self.without_s - 1


@dataclass(slots=True)
class Summary:
    """What a recording did.

    Attributes
    ----------
    n_requests, n_recorded, n_shards, n_tokens, n_rows : int
        Requests in all and recorded by this run; shards in the folder; tokens and rows recorded by this run.
    overhead : Overhead or None
        None where too few tokens are generated to measure it.
    routers : RouterMap
        What was understood of the model.
    """

    routers: RouterMap
    n_requests: int = 0
    n_recorded: int = 0
    n_shards: int = 0
    n_tokens: int = 0
    n_rows: int = 0
    overhead: Overhead | None = None


@dataclass(slots=True)
class Recorder:
    """A loaded model whose routers are understood; `record_batch` runs one batch.

    Attributes
    ----------
    loaded : LoadedModel
        The model.
    settings : RecordSettings
        The settings.
    routers : RouterMap
        What is known of the routers.
    """

    loaded: LoadedModel
    settings: RecordSettings
    routers: RouterMap

    @property
    def has_lookahead(self) -> bool:
        """Whether predictions are asked for and there is a layer to predict."""
        return self.settings.lookahead and bool(self.routers.lookahead_source())

    def batch(self, requests: Sequence[Request], *, keep_logits: bool = False) -> Batch:
        """Put requests together under this recording's sampling."""
        settings = self.settings
        return Batch(
            requests=requests,
            sampling=Sampling(settings.sampling, settings.temperature, settings.top_p, settings.seed),
            eos_ids=frozenset() if settings.ignore_eos else self.loaded.eos_ids,
            pad_id=self.loaded.pad_id,
            keep_logits=keep_logits,
        )

    def maker(self, batch: Batch) -> RowMaker:
        """Give what cuts a batch's forward passes into rows."""
        return RowMaker(self.routers, batch, self.settings.hidden_every, self.settings.allow_repeats)

    def run(self, batch: Batch, take: Callable[[Step], Any] | None, *, self_check: bool = False) -> None:
        """Run a batch, recording where ``take`` is given; ``self_check`` tries every chain on its own residual."""
        if take is None:
            run_batch(self.loaded.model, batch)
            return
        tap = RouterTap(
            self.loaded.model,
            self.routers,
            with_lookahead=self.has_lookahead,
            with_hidden=self.settings.hidden_every > 0,
            self_check=self_check,
        )
        with tap.attached(take):
            run_batch(self.loaded.model, batch)

    def record_batch(self, requests: Sequence[Request], writer: TraceWriter, on_token: Callable[[int], None]) -> int:
        """Run a batch and write its requests one after the other.

        Parameters
        ----------
        requests : sequence of Request
            What runs together.
        writer : TraceWriter
            Takes the rows.
        on_token : callable
            Told how many tokens each forward pass processed.

        Returns
        -------
        int
            Tokens recorded.
        """
        batch = self.batch(requests)
        maker = self.maker(batch)
        n_recorded = 0
        with Spool(writer.path.parent) as spool:

            def take(step: Step) -> None:
                nonlocal n_recorded
                for tokens in maker.take(step):
                    spool.add(tokens)
                    n_recorded += len(tokens.token_id)
                    on_token(len(tokens.token_id))

            self.run(batch, take)
            for row, entry in enumerate(requests):
                writer.add_request(
                    RequestMeta(request=entry.request, domain=entry.domain, prompt_tokens=len(entry.tokens))
                )
                for tokens in spool.blocks(row):
                    writer.write_rows(tokens.rows(entry.request))
        return n_recorded

    def overhead(self, requests: Sequence[Request]) -> Overhead | None:
        """Compare decode steps with and without recording on the first batch, interleaved, after a warm-up."""
        n_tokens = min(_OVERHEAD_TOKENS, max(entry.new_tokens for entry in requests))
        if n_tokens < 3:
            return None
        short = [Request(entry.request, entry.tokens, min(n_tokens, entry.new_tokens)) for entry in requests]
        times: dict[bool, list[float]] = {False: [], True: []}
        for number in range(1 + 2 * _OVERHEAD_ROUNDS):
            batch = self.batch(short)
            is_recording = number % 2 == 0
            # The warm-up also tries the lookahead's chains in a prefill and in cached steps.
            self_check = number == 0 and self.has_lookahead
            self.run(batch, self.maker(batch).take if is_recording else None, self_check=self_check)
            steps = [after - before for before, after in itertools.pairwise(batch.times_s)]
            if number and steps:
                times[is_recording].append(statistics.median(steps))
        if not times[True] or not times[False]:
            return None
        # Other work on the machine only ever adds time, so the least is the nearest to the truth.
        return Overhead(min(times[False]), min(times[True]))

    def meta(self) -> TraceMeta:
        """Describe the trace."""
        settings, routers, loaded = self.settings, self.routers, self.loaded
        rules = "; ".join(sorted({rule.words() for rule in routers.rules}))
        sampled = f"sampled at temperature {settings.temperature}, top-p {settings.top_p}, seed {settings.seed}"
        notes = [
            loaded.note,
            f"scores: {rules}, before any limit to groups",
            sampled if settings.sampling == "sample" else "greedy decoding",
            f"router {routers.sites[0].router_name}, {loaded.model.dtype}".replace("torch.", ""),
        ]
        return TraceMeta(
            model=ModelShape(
                name=loaded.name,
                n_layers=routers.n_layers,
                n_experts=routers.n_experts,
                top_k=routers.top_k,
                layer_index=tuple(site.layer_index for site in routers.sites),
                routing=routers.routing,
                hidden_size=routers.hidden_size,
                n_identity_experts=routers.n_identity,
            ),
            score_kind=routers.rules[0].kind,
            score_coverage="all",
            weights_kind="factors of the experts' outputs as the experts module was given them",
            lookahead_source=routers.lookahead_source() if self.has_lookahead else None,
            expert_bytes=tuple(
                expert_bytes(site, count) for site, count in zip(routers.sites, routers.n_experts, strict=True)
            ),
            provenance=Provenance(
                kind="recorded",
                source=f"{loaded.family} model {loaded.name}, prompts {settings.prompts.name}",
                licence=settings.licence,
                seed=settings.seed if settings.sampling == "sample" or loaded.is_random else None,
                note="; ".join(note for note in notes if note),
            ),
            recorder_version=f"moesim {__version__}, {library_versions()}",
            device=_device_name(loaded.model.device),
        )

    def columns(self) -> tuple[str, ...]:
        """Name the optional columns of the trace."""
        optional = {"lookahead": self.has_lookahead, "hidden": self.settings.hidden_every > 0}
        return ("topk_weights", "scores", *(name for name, is_kept in optional.items() if is_kept), "token_id")


def prepare(settings: RecordSettings) -> tuple[Recorder, list[Request]]:
    """Load a model, read the prompts, and understand the routers.

    Parameters
    ----------
    settings : RecordSettings
        The settings.

    Returns
    -------
    tuple of Recorder and list of Request

    Raises
    ------
    ConfigError
        If a setting, the model's files or the prompts are wrong.
    UnsupportedScenarioError
        If the model's routers are not understood.
    """
    loaded = load(settings)
    requests = read_prompts(
        settings.prompts,
        loaded.encode,
        new_tokens=settings.new_tokens,
        prompt_tokens=settings.prompt_tokens,
        limit=settings.limit,
        vocabulary=loaded.vocabulary,
    )
    for entry in requests:
        n_tokens = len(entry.tokens) + entry.new_tokens
        if loaded.max_tokens is not None and n_tokens > loaded.max_tokens:
            raise ConfigError(
                f"prompts: request {entry.request} needs {len(entry.tokens)} + {entry.new_tokens} tokens, the model "
                f"allows {loaded.max_tokens}; shorten with --prompt-tokens or --new-tokens"
            )
    routers = understand_model(loaded, requests[0].tokens)
    if settings.lookahead and routers.no_lookahead:
        raise ConfigError(f"lookahead: not possible for this model: {routers.no_lookahead}; record with --no-lookahead")
    return Recorder(loaded, settings, routers), requests


def understand_model(loaded: LoadedModel, prompt: Sequence[int]) -> RouterMap:
    """Watch one short forward pass of a model on the beginning of a prompt; nothing of it is recorded."""
    # Two tokens at least, all of them real, so that rows of different tokens can be told apart.
    tokens = (*prompt[:_PROBE_TOKENS], *range(1, 1 + max(0, 4 - len(prompt))))
    probe = Request(0, tuple(token % loaded.vocabulary for token in tokens), 0)

    def run() -> Tensor:
        run_batch(loaded.model, Batch([probe], Sampling()))
        return torch.tensor(probe.tokens)

    return understand(loaded.model, run)


def record(
    settings: RecordSettings,
    *,
    resume: bool = False,
    on_start: Callable[[Recorder, int, int, Overhead | None], None] | None = None,
    on_token: Callable[[int], None] | None = None,
) -> Summary:
    """Record a trace.

    Parameters
    ----------
    settings : RecordSettings
        The settings.
    resume : bool
        Go on where an interrupted recording into the same folder stopped.
    on_start : callable, optional
        Told the recorder, how many tokens are done and at most to do, and the overhead of recording.
    on_token : callable, optional
        Told how many tokens each forward pass processed.

    Returns
    -------
    Summary

    Raises
    ------
    MoesimError
        If a setting is wrong, the model is not understood, or a forward pass did not do what it should; shards that
        were complete before stay readable.
    """
    recorder, requests = prepare(settings)
    folder = ShardFolder(settings.out, _digest(recorder, requests), len(requests), resume=resume)
    groups = shards_of(requests, settings.batch, settings.shard_requests)
    todo = groups[folder.n_shards :]
    overhead = recorder.overhead(todo[0][: settings.batch]) if todo else None
    summary = Summary(recorder.routers, n_requests=len(requests), n_shards=folder.n_shards, overhead=overhead)
    if on_start is not None:
        done = sum(most_tokens(entry) for group in groups[: folder.n_shards] for entry in group)
        on_start(recorder, done, sum(map(most_tokens, requests)), overhead)
    meta, columns = recorder.meta(), recorder.columns()
    for group in todo:
        file = folder.next_shard()
        n_tokens = 0
        with TraceWriter(file, meta, columns) as writer:
            for start in range(0, len(group), settings.batch):
                batch = group[start : start + settings.batch]
                n_tokens += recorder.record_batch(batch, writer, on_token or (lambda _: None))
        folder.add(file, [entry.request for entry in group], n_tokens * recorder.routers.n_layers)
        summary.n_recorded += len(group)
        summary.n_tokens += n_tokens
        summary.n_rows += n_tokens * recorder.routers.n_layers
        summary.n_shards += 1
    return summary


def shards_of(requests: Sequence[Request], batch: int, shard_requests: int) -> list[list[Request]]:
    """Cut requests into shards of whole batches, so that a resumed run forms the same batches."""
    size = -(-shard_requests // batch) * batch
    return [list(requests[start : start + size]) for start in range(0, len(requests), size)]


def most_tokens(request: Request) -> int:
    """Count the tokens that a request puts through the model if nothing ends it early."""
    return len(request.tokens) + max(request.new_tokens - 1, 0)


def expert_bytes(site: Site, n_experts: int) -> int:
    """Count the bytes of one expert's weights: its share of every stacked parameter of the experts module."""
    is_split = site.adapter.name == "sorted by expert"
    parts = (site.block.get_submodule("input_linear"), site.block.get_submodule("output_linear")) if is_split else ()
    tensors = [tensor for module in parts or (site.experts,) for tensor in module.parameters()]
    total: int = sum(tensor.nbytes // (tensor.shape[0] if tensor.dim() == 3 else n_experts) for tensor in tensors)
    return max(1, total)


def library_versions() -> str:
    """Name the libraries that decide the values."""
    import transformers  # noqa: PLC0415

    return f"torch {torch.__version__}, transformers {transformers.__version__}"


def _digest(recorder: Recorder, requests: Sequence[Request]) -> str:
    prompts = hashlib.sha256(repr([(entry.tokens, entry.new_tokens, entry.domain) for entry in requests]).encode())
    return recorder.settings.digest(
        recorder.loaded.fingerprint, prompts.hexdigest(), recorder.meta().config_hash(), library_versions(), __version__
    )


def _device_name(device: torch.device) -> str:
    module: Any = getattr(torch, device.type, None)
    name = module.get_device_name(device) if device.type != "cpu" and hasattr(module, "get_device_name") else None
    return f"{device.type} ({name})" if name else device.type
