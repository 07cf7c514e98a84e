"""Prompts, settings and the command line's own behaviour; no model runs here."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from moesim.errors import ConfigError
from profiler.cli import main as cli
from profiler.record.model import read_config
from profiler.record.prompts import Request, read_prompts
from profiler.record.recording import shards_of
from profiler.record.settings import RecordSettings

ROOT = Path(__file__).parent.parent.parent


def _encode(text: str) -> list[int]:
    return list(text.encode())


def test_text_has_one_prompt_a_line(tmp_path: Path) -> None:
    """Blank lines are no prompts; long prompts are cut; a limit takes the first ones."""
    file = tmp_path / "prompts.txt"
    file.write_text("abc\n\n  \nde\nf\n")
    requests = read_prompts(file, _encode, new_tokens=3, prompt_tokens=2, limit=2)
    assert requests == [Request(0, (97, 98), 3), Request(1, (100, 101), 3)]


def test_json_lines_carry_domain_and_length(tmp_path: Path) -> None:
    """Objects give text or token ids, a domain, and their own number of new tokens."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "ab", "domain": "code"}\n{"tokens": [5, 6], "new_tokens": 0}\n')
    requests = read_prompts(file, _encode, new_tokens=7, vocabulary=128)
    assert requests == [Request(0, (97, 98), 7, "code"), Request(1, (5, 6), 0)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[1]", "either 'text' or 'tokens'"),
        ('{"text": "a", "tokens": [1]}', "either 'text' or 'tokens'"),
        ('{"text": "a", "domian": "x"}', "unknown field 'domian'"),
        ('{"text": 3}', "'text' has the illegal value 3"),
        ('{"text": "a", "new_tokens": -1}', "'new_tokens' has the illegal value -1"),
        ('{"text": ""}', "has no tokens"),
        ('{"tokens": [400]}', "token id 400 is outside the vocabulary, 0..127"),
        ('{"tokens": [true]}', "'tokens' has the illegal value"),
    ],
)
def test_wrong_prompts_name_line_and_field(line: str, message: str, tmp_path: Path) -> None:
    """A wrong line is refused with its number and what is wrong."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ConfigError) as raised:
        read_prompts(file, _encode, new_tokens=1, vocabulary=128)
    assert message in str(raised.value)
    assert "prompts.jsonl" in str(raised.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch": 0}, "batch: "),
        ({"top_p": 1.5, "sampling": "sample"}, "top_p: "),
        ({"temperature": 0.5}, "belong to sampling"),
        ({"dtype": "int8"}, "dtype: "),
        ({"bacth": 2}, "bacth: "),
    ],
)
def test_wrong_settings_are_named(values: dict[str, object], message: str) -> None:
    """Settings outside their range, unknown ones and contradictory ones are refused."""
    with pytest.raises(ConfigError, match=message):
        RecordSettings.of(model="m", prompts="p.txt", out="o", **values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a readable JSON"),
        ('{"model_type": "no-such"}', "'no-such' is not a family"),
        ("[]", "None is not a family"),
    ],
)
def test_wrong_model_configurations_are_refused(text: str, message: str, tmp_path: Path) -> None:
    """A configuration that the library does not know is refused by name."""
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(file)
    with pytest.raises(ConfigError, match="no such file"):
        read_config(tmp_path / "missing.json")


def test_shards_are_whole_batches() -> None:
    """A shard never cuts a batch, so a resumed run forms the same batches."""
    requests = [Request(n, (1,), 1) for n in range(10)]
    sizes = [len(shard) for shard in shards_of(requests, batch=3, shard_requests=4)]
    assert sizes == [6, 4]


def test_help_loads_no_library() -> None:
    """Listing the commands imports neither torch nor transformers."""
    program = (
        "import sys; from profiler.cli.main import run; code = run(['--help']); "
        "raise SystemExit(code or any(name in sys.modules for name in ('torch', 'transformers', 'pyarrow')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "record" in done.stdout


def test_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A command whose library is not installed says which one and how to get it."""
    monkeypatch.setitem(sys.modules, "profiler.cli.record", None)
    monkeypatch.setitem(cli.COMMANDS, "record", ("no_such_library.module:function", "Needs it."))
    assert cli.run(["record"]) == 2
    assert "needs the package 'no_such_library'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["rekord"], ["record"], ["record", "m", "--bacth", "2"], ["calibrate", "--nonsense"]]
)
def test_wrong_words_are_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown command or option and a missing argument end with exit code 2 and one line."""
    assert cli.run(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("moesim-profiler: error: ")
    assert shown.err.count("\n") == 1
    assert "--help'" in shown.err
