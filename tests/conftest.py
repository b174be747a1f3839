from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run the tests marked `anyio` on asyncio alone."""
    return "asyncio"
