"""The memory plan's numbers are those worked out by hand, and what does not fit is refused with what would."""

import json
import re
from pathlib import Path

import pytest

from moesim.cli.main import run
from moesim.errors import ConfigError, UnsupportedScenarioError
from moesim.memory import LONGEST_CONTEXT, MemoryBudget, plan_memory, uniform_slots
from moesim.replay.sharing import decision_key
from moesim.scenario import Scenario, build_scenario, load_scenarios, to_toml
from moesim.specs import load_model
from moesim.trace.synth import SynthSettings, synthesize
from moesim.workload import resolve
from tests.bridge import resolved_of, scenario_of
from tests.oracle_builders import case, same_in_all

MIB, GIB = 2**20, 2**30
GPT_OSS_EXPERT = 13_236_480
V4_EXPERT = 13_369_344


def _plan(name: str, device_bytes: int, context: int, slot_bytes: int = 0, **budget):
    """Plan a model of the catalog."""
    model = load_model(name)
    asked = MemoryBudget(device_bytes, "the test", 512 * MIB, context, **budget)
    return plan_memory(asked, model, model.n_experts, model.top_k, model.expert_bytes, slot_bytes)


def test_deepseek_v4_flash_on_84_gb():
    """Weights, 4096 tokens, two layers and six experts leave 68.1 GB: 118 slots in each of 43 layers."""
    plan = _plan("deepseek-v4-flash", 84 * 10**9, 4096)
    assert plan.staging_bytes == 2 * 256 * V4_EXPERT == 6_845_104_128
    assert plan.transient_bytes == 6 * V4_EXPERT == 80_216_064
    # 4096 tokens cost 33.8 MB: windows of 128 tokens, and compressed entries for the rest.
    assert (plan.resident_bytes, plan.kv_bytes) == (8_375_951_360, 33_816_576)
    left = 84_000_000_000 - 536_870_912 - 8_375_951_360 - 33_816_576 - 6_845_104_128 - 80_216_064
    assert plan.room_bytes == left == 68_128_040_960
    assert plan.n_slots_that_fit == left // (43 * V4_EXPERT) == 118
    # The 84 slots a layer that were published for this budget take 48.3 GB and leave 19.8 GB unused.
    assert _plan("deepseek-v4-flash", 84 * 10**9, 4096, 84 * 43 * V4_EXPERT).free_bytes == 19_837_970_432


def test_gpt_oss_20b_on_12_gib():
    """12 GiB hold gpt-oss-20b with a context of 8192 tokens and 24 of its 32 experts a layer."""
    plan = _plan("gpt-oss-20b", 12 * GIB, 8192)
    # 12 layers keep 8192 tokens and 12 keep 128, each 2 x 8 x 64 values of 2 bytes.
    assert plan.kv_bytes == 12 * (8192 + 128) * 2048 == 204_472_320
    assert plan.staging_bytes == 2 * 32 * GPT_OSS_EXPERT
    assert plan.transient_bytes == 4 * GPT_OSS_EXPERT
    left = 12 * GIB - 512 * MIB - 3_595_505_280 - 204_472_320 - 68 * GPT_OSS_EXPERT
    assert plan.room_bytes == left == 7_647_972_736
    assert plan.n_slots_that_fit == left // (24 * GPT_OSS_EXPERT) == 24
    # 24 slots leave 23,760,256 bytes, and a token more takes 24,576.
    assert plan.context_that_fits(24 * 24 * GPT_OSS_EXPERT) == 8192 + 23_760_256 // 24_576 == 9158


def test_parts_add_up():
    """Every byte of the device is in exactly one part."""
    plan = _plan("gpt-oss-20b", 12 * GIB, 8192, 5_000_000_000)
    assert sum(plan.parts().values()) == 12 * GIB
    assert plan.as_dict()["free_bytes"] == plan.free_bytes == plan.room_bytes - 5_000_000_000


def test_requests_and_tokens_of_a_step_count():
    """Each request has its own context, and the transient buffer never exceeds a layer's experts."""
    one, four = (_plan("gpt-oss-20b", 24 * GIB, 8192, n_requests=n, n_step_tokens=n) for n in (1, 4))
    assert four.kv_bytes == 4 * one.kv_bytes
    assert four.transient_bytes == 4 * one.transient_bytes
    assert _plan("gpt-oss-20b", 24 * GIB, 8192, n_step_tokens=100).transient_bytes == 32 * GPT_OSS_EXPERT


def test_context_may_be_unbounded_or_impossible():
    """Where memory is plenty any context fits, where slots take it all none does."""
    assert _plan("gpt-oss-20b", 10**13, 10).context_that_fits(0) == LONGEST_CONTEXT
    assert _plan("gpt-oss-20b", 12 * GIB, 10).context_that_fits(12 * GIB) is None


def test_c20_small_layers_leave_their_room_to_the_others():
    """A layer with few experts stops at all of them, and the others get what it leaves."""
    assert uniform_slots(12 * 10, (8, 16, 4), (10, 10, 10)) == 4
    assert uniform_slots(15 * 10, (8, 16, 4), (10, 10, 10)) == 5
    assert uniform_slots(10**9, (8, 16, 4), (10, 10, 10)) == 16
    assert uniform_slots(29, (8, 16, 4), (10, 10, 10)) == 0
    assert uniform_slots(-1, (8, 16, 4), (10, 10, 10)) == -1


def test_c23_gb_is_not_gib(tmp_path):
    """A budget of 48 GB holds 83 slots of DeepSeek-V4-Flash a layer, one of 48 GiB 89; the plan has units too."""
    assert [uniform_slots(room, [256] * 43, [V4_EXPERT] * 43) for room in (48 * 10**9, 48 * GIB)] == [83, 89]
    fields = {
        "trace": "t",
        "device": "h200",
        "memory": {"context_tokens": 1, "device_bytes": "84 GB", "reserve": "1 GiB"},
    }
    memory = build_scenario(fields, "case").memory
    assert (memory.device_bytes, memory.reserve) == (84 * 10**9, GIB)
    with pytest.raises(ConfigError, match=r"memory\.device_bytes: '84' is not a quantity|memory\.device_bytes.*unit"):
        build_scenario(fields | {"memory": {"context_tokens": 1, "device_bytes": "84"}}, "case")


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({}, r"memory\.context_tokens is missing"),
        ({"context_tokens": 1, "resrve": 0}, "did you mean 'reserve'"),
        ({"context_tokens": -1}, r"memory\.context_tokens = -1"),
        ({"context_tokens": True}, r"memory\.context_tokens = true"),
    ],
)
def test_wrong_memory_settings_are_named(memory, message):
    """A wrong key or value in the table is an error that names it."""
    with pytest.raises(Exception, match=message):
        build_scenario({"trace": "t", "device": "h200", "memory": memory}, "case")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Give a folder with a trace of gpt-oss-20b's shape and a scenario that plans 12 GiB."""
    folder = tmp_path_factory.mktemp("plan")
    settings = SynthSettings(
        n_layers=24, n_experts=32, top_k=4, n_requests=1, prompt_tokens=(2, 2), decode_tokens=(3, 3)
    )
    synthesize(folder / "t.parquet", settings)
    (folder / "s.toml").write_text(
        'trace = "t.parquet"\nmodel = "gpt-oss-20b"\ndevice = "rtx-3060-12gb"\nmemory.context_tokens = 8192\n'
    )
    return folder


def _scenario(folder: Path, **settings) -> Scenario:
    """Load the scenario with dotted settings, written with two underscores for a dot."""
    return load_scenarios(folder / "s.toml", {key.replace("__", "."): value for key, value in settings.items()})[0]


def test_auto_slots_come_from_the_plan(folder):
    """With a [memory] table and no other figure, slots are what the device leaves, and the result says so."""
    info = resolve(_scenario(folder)).info()
    assert info["slots"] == 24
    assert info["memory_plan"]["free_bytes"] == 23_760_256
    assert info["memory_plan"]["device_source"] == "device rtx-3060-12gb (published)"
    assert info["notes"] == [
        "slots = auto: 24 per layer from the memory plan, which leaves 7647972736 bytes for experts"
    ]


def test_batch_and_drafts_need_room(folder):
    """Every request of a batch has its key-value cache, and the transient buffer takes the tokens of a whole step."""
    one = resolve(_scenario(folder)).memory
    many = resolve(_scenario(folder, decode__batch=2, decode__mtp_depth=1, decode__acceptance=0.5)).memory
    assert many.kv_bytes == 2 * one.kv_bytes
    # Four tokens select 16 of the 32 experts at most.
    assert many.transient_bytes == 4 * one.transient_bytes
    assert many.n_slots_that_fit < one.n_slots_that_fit


def test_budget_stays_bytes_for_experts(folder):
    """A cache budget decides the slots also beside a plan, which then checks them."""
    assert resolve(_scenario(folder, cache__budget="5 GB")).info()["slots"] == 5 * 10**9 // (24 * GPT_OSS_EXPERT)
    with pytest.raises(ConfigError, match=r"cache\.slots = 'auto' \(28 from cache\.budget\) does not fit"):
        resolve(_scenario(folder, cache__budget="9 GB"))


def test_selective_prompts_need_no_staging(folder):
    """Where no layer is ever staged its buffers become slots; prompts that are left out still need them."""
    selective, skipped = (resolve(_scenario(folder, prefill__mode=mode)).info() for mode in ("selective", "skip"))
    assert selective["memory_plan"]["staging_bytes"] == 0
    assert (selective["slots"], skipped["slots"]) == (26, 24)


def test_slots_that_do_not_fit_are_refused_with_what_would(folder):
    """The message holds the missing bytes, the slots that fit, and that only a [memory] table makes it."""
    with pytest.raises(ConfigError) as refused:
        resolve(_scenario(folder, cache__slots=25))
    message = str(refused.value)
    missing = 24 * GPT_OSS_EXPERT - 23_760_256
    assert f"{missing} bytes more than the {12 * GIB} bytes of device rtx-3060-12gb" in message
    assert "what fits: 24 slots per layer; or raise memory.device_bytes, or leave [memory] out" in message
    with pytest.raises(ConfigError, match=r"context of \d+ tokens beside these slots"):
        resolve(_scenario(folder, cache__slots=24, memory__context_tokens=10_000))
    unchecked = _scenario(folder, cache__slots=25).model_copy(update={"memory": None})
    assert resolve(unchecked).info()["memory_plan"] is None


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("3 GB", "comes to 0 slots.*what fits: nothing, as even without slots"),
        ("5.4 GB", "comes to 0 slots.*what fits: no slot, as one per layer lacks 154604672 bytes"),
    ],
)
def test_c26_a_plan_without_room_is_refused(folder, device, message):
    """Automatic slots never come to nothing."""
    with pytest.raises(ConfigError, match=message):
        resolve(_scenario(folder, memory__device_bytes=device))


def test_global_pool_takes_what_is_left(folder):
    """A global pool without a size is all that the plan leaves; a stated one is checked."""
    shared = {"cache__scope": "global", "prefill__mode": "staging"}
    assert resolve(_scenario(folder, **shared)).info()["pool_bytes"] == 7_647_972_736
    with pytest.raises(ConfigError, match=r"cache\.pool does not fit"):
        resolve(_scenario(folder, **shared, cache__pool="8 GB"))


def test_plan_needs_a_model():
    """The shape in a trace says nothing of weights, so it cannot be planned."""
    inp = case(same_in_all(2, [0]), n_experts=[8, 8], top_k=[1, 1], slots=[1, 1])
    scenario = scenario_of(inp).with_settings({"memory.context_tokens": 10})
    with pytest.raises(UnsupportedScenarioError, match="name a model"):
        resolved_of(inp, scenario)


def test_settings_survive_toml(folder):
    """A scenario with a [memory] table loads again from its own TOML."""
    scenario = _scenario(folder, memory__reserve="1 GB")
    (folder / "again.toml").write_text(to_toml(scenario))
    assert load_scenarios(folder / "again.toml")[0].memory == scenario.memory


def test_devices_share_decisions_only_where_slots_are_the_same(folder):
    """Runs on two devices decide alike unless the memory plan reads their sizes."""
    here, there = _scenario(folder), _scenario(folder, device="rtx-4090")
    assert decision_key(here) != decision_key(there)
    plain = [item.model_copy(update={"memory": None}) for item in (here, there)]
    assert decision_key(plain[0]) == decision_key(plain[1])


def test_plan_command(folder, capsys):
    """The command prints the plan for people and for programs, and fails in one line without a plan."""
    path = str(folder / "s.toml")
    assert run(["plan", path, "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert (plan["slots"], plan["n_slots_that_fit"], plan["context_that_fits"]) == (24, 24, 9158)
    assert run(["plan", path]) == 0
    printed = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "7,624,212,480" in printed
    assert "Most slots per layer that fit: 24. Longest context beside these slots: 9,158 tokens." in printed
    assert run(["plan", path, "--set", "cache.slots=25"]) == 2
    assert "does not fit the [memory] table" in capsys.readouterr().err
    (folder / "none.toml").write_text('trace = "t.parquet"\nmodel = "gpt-oss-20b"\ndevice = "rtx-3060-12gb"\n')
    assert run(["plan", str(folder / "none.toml"), "--set", "cache.slots=4"]) == 2
    assert "--set memory.context_tokens=8192" in capsys.readouterr().err
