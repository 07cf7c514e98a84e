"""Atomic files and named random streams."""

from pathlib import Path

import pytest

from moesim.errors import ConfigError
from moesim.files import atomic_write, write_bytes, write_text
from moesim.seeding import generators


def test_atomic_write(tmp_path: Path) -> None:
    """The name appears when the block ends, in a folder that is made, and an older file is replaced."""
    path = tmp_path / "new" / "a.txt"
    with atomic_write(path) as temporary:
        temporary.write_text("one")
        assert temporary.parent == path.parent
        assert not path.exists()
    assert path.read_text() == "one"
    write_text(path, "zwei ß\n")
    assert path.read_bytes() == "zwei ß\n".encode()
    write_bytes(path, b"\x00")
    assert path.read_bytes() == b"\x00"
    assert [file.name for file in path.parent.iterdir()] == ["a.txt"]


def test_atomic_write_after_an_error(tmp_path: Path) -> None:
    """After an error the older file is as it was and nothing else is there."""
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def fail() -> None:
        with atomic_write(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


def test_streams_are_keyed_by_name() -> None:
    """A stream depends on seed and name, not on the order, the number or the names of others."""
    alone = generators(3, "ties")["ties"].integers(2**62)
    assert generators(3, "arrivals", "ties")["ties"].integers(2**62) == alone
    assert generators(3, "ties", "arrivals")["ties"].integers(2**62) == alone
    others = [generators(4, "ties")["ties"], generators(3, "tie")["tie"], generators(3, "arrivals")["arrivals"]]
    assert all(other.integers(2**62) != alone for other in others)
    # A fixed value: a later version must give the same streams.
    assert generators(0, "a")["a"].bit_generator.random_raw() == 342029267598369997


def test_streams_are_checked() -> None:
    """A negative seed and a name given twice are refused."""
    with pytest.raises(ConfigError, match="-1 is negative"):
        generators(-1, "a")
    with pytest.raises(ConfigError, match="given twice"):
        generators(1, "a", "a")
