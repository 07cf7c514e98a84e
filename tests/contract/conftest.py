"""What every contract test shares: it runs once per backend."""

import pytest

from tests.bridge import BACKENDS


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> str:
    """Name of the backend that a test asks."""
    name: str = request.param
    return name
