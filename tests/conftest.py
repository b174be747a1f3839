from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from playwright.sync_api import Browser, Page, sync_playwright

from config import Settings
from tests.processes import Process, server

# `pytest --hypothesis-profile thorough` takes minutes instead of seconds.
COMMON: Any = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("usual", max_examples=400, **COMMON)
settings.register_profile("thorough", max_examples=10_000, **COMMON)
settings.load_profile("usual")


def pytest_configure(config: pytest.Config) -> None:
    """Forget settings of the shell. Give each of several workers (`pytest -n 2`) a processor.

    On the same two, the threads of two models would wait for each other.
    """
    for name in map(str.upper, Settings.model_fields):
        os.environ.pop(name, None)
        os.environ.pop(f"HF_{name}", None)
    worker: str | None = getattr(config, "workerinput", {}).get("workerid")
    if worker and hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[int(worker.removeprefix("gw")) % len(allowed)]})


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run the tests marked `anyio` on asyncio alone."""
    return "asyncio"


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """The server as the README starts it, for tests that leave it as they find it."""
    with server("server:app", tmp_path_factory.mktemp("bundled")) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        yield playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page in a fresh profile, in which nothing may go wrong unseen."""
    troubles: list[str] = []
    with browser.new_context(viewport={"width": 1200, "height": 900}) as context:
        page = context.new_page()
        page.on("console", lambda said: troubles.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        yield page
    refused = "error: Failed to load resource: "  # said of every answer that is an error
    assert [text for text in troubles if not text.startswith(refused)] == []
