"""Faults of real recorders, each shown not to happen: padding, lost rows, silent hooks, warm-up, made-up routes."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from moesim.errors import TraceFormatError, UnsupportedScenarioError
from moesim.trace.stats import expert_counts
from profiler.record.prompts import Request
from profiler.record.recording import prepare, record
from profiler.record.rows import RowMaker
from profiler.record.settings import RecordSettings
from profiler.record.tap import Step
from profiler.routers.sites import Generic, Selection
from tests.profiler.recording_helpers import (
    PROMPTS,
    assert_equal,
    record_batches,
    recorder_for,
    requests_of,
    save_config,
    save_prompts,
)
from tests.profiler.tiny_families import tiny_model


def test_c01_padding_leaves_no_row(tmp_path: Path) -> None:
    """Prompts of 5 and 3 tokens give 8 prefill rows with positions from 0; finished requests give no decode row."""
    recorder = recorder_for(tiny_model("mixtral", num_hidden_layers=1))
    prompts = [(9, 8, 7, 6, 5), (4, 3, 2)]
    two = record_batches(recorder, tmp_path / "two", [Request(n, tokens, 0) for n, tokens in enumerate(prompts)])
    assert two.n_rows == 8
    assert [entry.position.tolist() for entry in requests_of(two)] == [[0, 1, 2, 3, 4], [0, 1, 2]]
    assert int(expert_counts(requests_of(two), two.meta.model).sum()) == 16
    new_tokens = (2, 2, 1, 2)
    four = [Request(n, (*PROMPTS[n % 3], n + 1), count) for n, count in enumerate(new_tokens)]
    decoded = requests_of(record_batches(recorder, tmp_path / "four", four))
    assert [entry.n_decode_tokens for entry in decoded] == [1, 1, 0, 1]


def test_c01_rows_do_not_depend_on_padding(tmp_path: Path) -> None:
    """A request recorded beside a longer one has the ids it has alone, and weights and scores but for rounding."""
    recorder = recorder_for(tiny_model("qwen3_moe"))
    alone = requests_of(record_batches(recorder, tmp_path / "alone", [Request(1, PROMPTS[1], 4)]))[0]
    both = [Request(0, PROMPTS[0], 4), Request(1, PROMPTS[1], 4)]
    beside = requests_of(record_batches(recorder, tmp_path / "beside", both))[1]
    assert np.array_equal(alone.topk_ids, beside.topk_ids)
    assert np.array_equal(alone.token_id, beside.token_id)
    np.testing.assert_allclose(alone.topk_weights, beside.topk_weights, rtol=1e-4)
    np.testing.assert_allclose(alone.scores, beside.scores, rtol=2e-3)


def test_c02_replayed_rows_are_refused(tmp_path: Path) -> None:
    """When a decode step repeats the previous step's values in all layers twice, the recorder stops."""
    recorder = recorder_for(tiny_model("mixtral"))
    requests = [Request(0, PROMPTS[0], 6)]
    batch = recorder.batch(requests)
    steps: list[Step] = []
    recorder.run(batch, steps.append)

    def replay(maker: RowMaker) -> None:
        maker.take(steps[0])
        for step in steps[1:]:
            values = {name: getattr(steps[1], name) for name in ("topk_ids", "topk_weights", "scores", "lookahead")}
            maker.take(Step(token_id=step.token_id, hidden=None, **values))

    batch.is_done[0] = False
    with pytest.raises(TraceFormatError, match="captured graph was replayed"):
        replay(recorder.maker(batch))
    replay(RowMaker(recorder.routers, batch, allow_repeats=True))
    maker = recorder.maker(batch)
    for step in steps:
        maker.take(step)


def test_c03_row_counts(tmp_path: Path) -> None:
    """A prompt of 7 with 3, 1 and 0 new tokens gives 9, 7 and 7 rows per layer, together in one batch."""
    recorder = recorder_for(tiny_model("mixtral"))
    requests = [Request(n, PROMPTS[0], count) for n, count in enumerate((3, 1, 0))]
    recorded = requests_of(record_batches(recorder, tmp_path / "trace", requests))
    assert [entry.n_tokens for entry in recorded] == [9, 7, 7]
    assert [entry.n_decode_tokens for entry in recorded] == [2, 0, 0]
    assert recorded[0].step.tolist() == [0] * 7 + [1, 2]
    assert all(entry.prompt_tokens == 7 for entry in recorded)


def test_c03_end_of_sequence_token_has_no_row(tmp_path: Path) -> None:
    """A request that chooses its end token early has rows up to the token before; its neighbours go on."""
    model = tiny_model("mixtral")
    recorder = recorder_for(model)
    batch = recorder.batch([Request(0, PROMPTS[0], 6), Request(1, PROMPTS[1], 6)])
    recorder.run(batch, None)
    end = batch.produced[0][2]
    assert end not in batch.produced[1]
    ending = dataclasses.replace(recorder.loaded, eos_ids=frozenset([end]))
    recorder = dataclasses.replace(recorder, loaded=ending)
    recorded = requests_of(record_batches(recorder, tmp_path / "trace", batch.requests))
    assert recorded[0].token_id.tolist() == [*PROMPTS[0], *batch.produced[0][:2]]
    assert recorded[1].token_id.tolist() == [*PROMPTS[1], *batch.produced[1][:5]]


def test_c04_draft_router_is_left_out(tmp_path: Path) -> None:
    """A draft head with a layer 0 of its own changes nothing in the target's layer 0; another stack is refused."""
    model = tiny_model("mixtral")
    plain = requests_of(record_batches(recorder_for(model), tmp_path / "plain", [Request(0, PROMPTS[0], 3)]))
    draft = torch.nn.Module()
    draft.layers = torch.nn.ModuleList([copy.deepcopy(model.model.layers[1])])
    model.mtp = draft
    recorder = recorder_for(model)
    assert recorder.routers.n_layers == 4
    assert_equal(requests_of(record_batches(recorder, tmp_path / "draft", [Request(0, PROMPTS[0], 3)])), plain)
    model.mtp, model.second = None, draft
    with pytest.raises(UnsupportedScenarioError, match="2 stacks of layers"):
        recorder_for(model)


def test_c05_shared_experts_are_no_columns(tmp_path: Path) -> None:
    """A model with shared experts records its k routed ids and no more."""
    reader = record_batches(recorder_for(tiny_model("deepseek_v2")), tmp_path / "trace", [Request(0, PROMPTS[0], 2)])
    assert reader.meta.model.top_k == (2, 2, 2)
    assert reader.meta.model.layer_index == (1, 2, 3)
    assert requests_of(reader)[0].topk_ids.shape[2] == 2


def test_c06_ids_past_255_stay_whole(tmp_path: Path) -> None:
    """Ids of 512 experts come back as the experts were given them."""
    model = tiny_model("mixtral", num_local_experts=512, num_experts_per_tok=8, num_hidden_layers=2)
    recorder, given = recorder_for(model), []
    handle = recorder.routers.sites[1].experts.register_forward_pre_hook(lambda _, args: given.append(args[1].clone()))
    recorded = requests_of(record_batches(recorder, tmp_path / "trace", [Request(0, PROMPTS[0], 3)]))[0]
    handle.remove()
    wanted = np.sort(torch.cat(given).numpy(), axis=1)
    assert wanted.max() > 255
    assert np.array_equal(np.sort(recorded.topk_ids[:, 1], axis=1), wanted)


def test_c07_no_row_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 sequences of 10 positions and 3 layers give 1,920 rows; a hook that loses rows is an error."""
    recorder = recorder_for(tiny_model("mixtral", num_hidden_layers=3))
    requests = [Request(n, tuple((7 * n + place) % 128 for place in range(6)), 5) for n in range(64)]
    assert record_batches(recorder, tmp_path / "trace", requests).n_rows == 1920
    select = Generic.select

    def short(adapter: Generic, *args: Any) -> Selection:
        ids, weights = select(adapter, *args)
        return Selection(ids[:32], weights[:32])

    monkeypatch.setattr(Generic, "select", short)
    with pytest.raises(TraceFormatError, match="32 rows for 384 tokens"):
        record_batches(recorder, tmp_path / "short", requests)
    assert not (tmp_path / "short").exists()


def test_c08_warm_up_is_not_recorded(tmp_path: Path) -> None:
    """Looking at the model and timing it leaves no row: 4 real tokens count 4 times k selections."""
    prompts = save_prompts(tmp_path, [{"tokens": [5, 6], "new_tokens": 3}])
    settings = RecordSettings.of(model=save_config(tmp_path), prompts=prompts, out=tmp_path / "out")
    summary = record(settings)
    assert summary.overhead is not None
    recorder, _ = prepare(settings)
    reader = record_batches(recorder, tmp_path / "again", [Request(0, (5, 6), 3)])
    counts = expert_counts(requests_of(reader), reader.meta.model)
    assert counts.sum(axis=1).tolist() == [4 * 2] * 4
    assert summary.n_tokens == 4


def test_c10_silent_router_is_an_error(tmp_path: Path) -> None:
    """Routers whose values are computed past their module stop the recording, at the start and in any later step."""
    model = tiny_model("mixtral")
    recorder = recorder_for(model)
    blocks = [site.block for site in recorder.routers.sites]

    def past_the_module(block: Any) -> Any:
        def forward(hidden: Any) -> Any:
            flat = hidden.view(-1, hidden.shape[-1])
            _, weights, ids = block.gate.forward(flat)
            return block.experts(flat, ids, weights).view(hidden.shape)

        return forward

    for block in blocks:
        block.forward = past_the_module(block)
    with pytest.raises(UnsupportedScenarioError, match="no router output for 4 of 4 MoE layers"):
        record_batches(recorder, tmp_path / "trace", [Request(0, PROMPTS[0], 2)])
    assert not list(tmp_path.iterdir())
    with pytest.raises(UnsupportedScenarioError, match="no router output"):
        recorder_for(model)


def test_c11_cached_decoding_with_the_flag_on(tmp_path: Path) -> None:
    """A configuration that asks for router logits, whose loss fails on cached steps, is recorded: 4 + 1 rows."""
    config = save_config(tmp_path, "olmoe", output_router_logits=True)
    prompts = save_prompts(
        tmp_path, [{"tokens": [5, 6, 7, 8], "new_tokens": 2}, {"tokens": [9, 9, 3], "new_tokens": 1}]
    )
    settings = RecordSettings.of(model=config, prompts=prompts, out=tmp_path / "out", batch=2)
    recorder, requests = prepare(settings)
    recorded = requests_of(record_batches(recorder, tmp_path / "trace", requests))
    assert [(~entry.is_decode).sum() for entry in recorded] == [4, 3]
    assert [entry.n_decode_tokens for entry in recorded] == [1, 0]


def test_c12_group_limit_never_reaches_a_dropped_group(tmp_path: Path) -> None:
    """With biased scores [0.30, -0.05 | 0.10, 0.05] and one group kept, the recorded ids are {0, 1}."""
    wanted = torch.tensor([0.30, -0.05, 0.10, 0.05])
    model = tiny_model("deepseek_v3", n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2)
    recorder = recorder_for(model, "deepseek_v3", allow_repeats=True)
    for site in recorder.routers.sites:
        # All logits are 0, so every sigmoid is 0.5 and the bias alone decides.
        site.router.weight.zero_()
        site.router.e_score_correction_bias.copy_(wanted - 0.5)
    recorded = requests_of(record_batches(recorder, tmp_path / "trace", [Request(0, PROMPTS[0], 3)]))[0]
    assert (recorded.topk_ids == [0, 1]).all()
    np.testing.assert_allclose(recorded.scores, np.broadcast_to(wanted, recorded.scores.shape), atol=1e-3)


def test_c13_nan_scores_stop_the_recording(tmp_path: Path) -> None:
    """A router score that is NaN for a real token is an error that names the layer, and leaves no file."""
    model = tiny_model("mixtral")
    recorder = recorder_for(model)
    recorder.routers.sites[2].router.weight[3] = float("nan")
    with pytest.raises(TraceFormatError, match=r"router score of layer 2 is NaN"):
        record_batches(recorder, tmp_path / "trace", [Request(0, PROMPTS[0], 2)])
    assert not list(tmp_path.iterdir())


def test_c14_recorded_ids_win_over_ties(tmp_path: Path) -> None:
    """With all scores equal the trace holds the ids that ran, twice the same."""
    model = tiny_model("mixtral")
    recorder, given = recorder_for(model, allow_repeats=True), []
    for site in recorder.routers.sites:
        site.router.weight.zero_()
    handle = recorder.routers.sites[0].experts.register_forward_pre_hook(lambda _, args: given.append(args[1].clone()))
    first = requests_of(record_batches(recorder, tmp_path / "one", [Request(0, PROMPTS[0], 3)]))
    handle.remove()
    second = requests_of(record_batches(recorder, tmp_path / "two", [Request(0, PROMPTS[0], 3)]))
    assert_equal(first, second)
    assert np.array_equal(first[0].topk_ids[:, 0], torch.cat(given).numpy())


def test_c15_last_token_has_no_route(tmp_path: Path) -> None:
    """A token that was only chosen has no row; in the next turn's prompt it has a real one."""
    recorder = recorder_for(tiny_model("mixtral"))
    # Beside a longer request, so that forward passes go on after this one has its last token.
    turn = [Request(0, (1, 2), 1), Request(1, PROMPTS[0], 4)]
    first = requests_of(record_batches(recorder, tmp_path / "one", turn))[0]
    assert first.token_id.tolist() == [1, 2]
    batch = recorder.batch(turn)
    recorder.run(batch, None)
    answer = batch.produced[0][0]
    second = requests_of(record_batches(recorder, tmp_path / "two", [Request(0, (1, 2, answer, 9), 0)]))[0]
    assert second.token_id.tolist() == [1, 2, answer, 9]
    assert np.array_equal(second.topk_ids[:2], first.topk_ids)
    assert not (second.topk_ids[2] == [0, 1]).all()
    np.testing.assert_allclose(second.scores[2].sum(axis=1, dtype=np.float32), 1, atol=2e-3)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("mixtral", "softmax"), ("deepseek_v3", "sigmoid"), ("deepseek_v4", "sqrtsoftplus"), ("gpt_oss", "logit")],
)
def test_c16_trace_names_its_scores(family: str, kind: str, tmp_path: Path) -> None:
    """The file says which function made its scores; values above 1 are legal where that function has them."""
    reader = record_batches(recorder_for(tiny_model(family), family), tmp_path / "trace", [Request(0, PROMPTS[0], 3)])
    assert reader.meta.score_kind == kind
    scores = requests_of(reader)[0].scores.astype(np.float32)
    if kind == "softmax":
        np.testing.assert_allclose(scores.sum(axis=2), 1, atol=2e-3)
    if kind == "sqrtsoftplus":
        assert scores.max() > 1
        weights = requests_of(reader)[0].topk_weights
        np.testing.assert_allclose(weights.sum(axis=2), 1.5, rtol=1e-5)
