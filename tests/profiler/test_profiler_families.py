"""Every family: ids, logits, lookahead, and the page that says so."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from profiler.record.rows import RowMaker, Tokens
from profiler.record.tap import Step
from tests.profiler.family_table import REFUSED, Row, check_family, refusal, render
from tests.profiler.tiny_families import FAMILIES, REQUIRED

PAGE = Path(__file__).parent.parent.parent / "docs" / "families.md"
_ROWS: dict[str, Row] = {}


@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_recorded_exactly(family: str) -> None:
    """A family's ids are those its experts ran on, its logits do not change, and its lookahead checks itself."""
    _ROWS[family] = check_family(family)
    assert _ROWS[family].is_good, _ROWS[family]


@pytest.mark.parametrize("family", [*REQUIRED, "inkling2_text", "zaya"])
def test_family_is_recorded_exactly_in_bfloat16(family: str) -> None:
    """In bfloat16, where routers and norms mix types, all of it holds as well."""
    row = check_family(family, dtype="bfloat16")
    assert row.is_good, row


@pytest.mark.parametrize("family", REFUSED)
def test_family_that_is_not_understood_is_refused(family: str) -> None:
    """A family whose experts are something else is refused with what was found."""
    assert any(word in refusal(family) for word in ("'experts'", "2 times"))


def test_page_of_families_is_true() -> None:
    """The committed table is what the run gives: at least 45 families, all required ones among them."""
    rows = [_ROWS.get(family) or check_family(family) for family in FAMILIES]
    good = {row.family for row in rows if row.is_good}
    assert len(good) >= 45
    assert set(REQUIRED) <= good
    page = render(rows, [(family, refusal(family)) for family in REFUSED])
    if f"transformers {transformers.__version__};" in PAGE.read_text(encoding="utf-8"):
        assert page == PAGE.read_text(encoding="utf-8"), "run python -m tests.profiler.family_table docs/families.md"


@pytest.mark.parametrize("family", ["mixtral", "llama4_text", "jetmoe", "longcat_flash"])
def test_wrong_ids_are_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of ids fails when a recorder writes a neighbour of the expert that ran."""
    take = RowMaker.take

    def shifted(maker: RowMaker, step: Step) -> list[Tokens]:
        taken = take(maker, step)
        for tokens in taken:
            tokens.arrays["topk_ids"] = (tokens.arrays["topk_ids"] + 1) % maker.routers.n_experts[0]
        return taken

    monkeypatch.setattr(RowMaker, "take", shifted)
    assert not check_family(family).ids_exact
