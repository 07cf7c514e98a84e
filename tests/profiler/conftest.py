"""One thread for every test that runs a model: results are then the same on every machine, and workers do not fight."""

from collections.abc import Iterator

import pytest


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
