"""One thread for every test that runs a model: results are then the same on every machine, and workers do not fight."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

# Helpers are looked through for examples too, which imports them; the tests themselves skip with a reason.
collect_ignore = (
    [] if find_spec("torch") else ["family_table.py", "executor_helpers.py", "recording_helpers.py", "tiny_families.py"]
)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Hold torch to one thread where it is installed."""
    try:
        import torch  # noqa: PLC0415
    except ModuleNotFoundError:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
