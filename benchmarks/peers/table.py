"""The peers as contestants, and the settings they are measured with."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.contestants import PEERS_PYTHON, PORT, Contestant, named, named_list
from benchmarks.models import model_folder
from benchmarks.peers.setting import Setting


@dataclass(frozen=True)
class Peer:
    """A peer.

    Attributes:
        contestant: How it is started and asked, without model and setting.
        natural: As its documentation has it, with batches of 32 where it batches.
        best: The setting found best at 32 clients, by shape (`benchmarks.peers.search`).
        batches: What the search tries as largest batch.
        variants: What the search tries as variant.
    """

    contestant: Contestant
    natural: Setting
    best: Mapping[str, Setting]
    batches: Sequence[int] = (1, 2, 4, 8, 32)
    variants: Sequence[int] = (0,)

    def serving(self, shape: str, setting: Setting) -> Contestant:
        """Return the contestant that serves the model of `shape` with `setting`."""
        variables = {"MODEL": str(model_folder(shape)), "PORT": PORT, **setting.variables()}
        return replace(self.contestant, variables={**self.contestant.variables, **variables})


def _uvicorn(python: str, target: str, *arguments: str) -> tuple[str, ...]:
    words = ("--port", PORT, "--log-level", "warning", *arguments)
    return (python, "-m", "uvicorn", f"benchmarks.peers.{target}", *words)


def _json(name: str, command: tuple[str, ...], path: str, **variables: str) -> Contestant:
    return Contestant(name, command, variables, path, "application/json", named)


DOCS_PAGE = Peer(
    Contestant("docs page", _uvicorn(sys.executable, "docs_page:one_by_one", "--factory")),
    natural=Setting(),
    best={"tiny": Setting(2, 1), "base": Setting()},
    batches=(1,),
)
DOCS_BATCHING = Peer(
    Contestant("docs page, batching", _uvicorn(sys.executable, "docs_page:batched", "--factory")),
    natural=Setting(batch=32, wait_ms=1),
    best={"tiny": Setting(2, 1, 4, 1), "base": Setting(2, 1, 2, 1)},
)
FASTAPI = Peer(
    _json("FastAPI", _uvicorn(PEERS_PYTHON, "fastapi_executor:app"), "/predict"),
    natural=Setting(),
    best={"tiny": Setting(2, 1, variant=2), "base": Setting(2, 1, variant=1)},
    batches=(1,),
    variants=(0, 1, 2),
)
LITSERVE = Peer(
    _json("LitServe", (PEERS_PYTHON, "-m", "benchmarks.peers.litserve_batch"), "/predict"),
    natural=Setting(batch=32, wait_ms=10),
    best={"tiny": Setting(2, 1, 4, 1), "base": Setting(2, 1, 2, 1)},
    variants=(0, 1),
)
MOSEC = Peer(
    _json(
        "mosec",
        (PEERS_PYTHON, "-m", "benchmarks.peers.mosec_batch", "--port", PORT, "--timeout", "60000"),
        "/inference",
    ),
    natural=Setting(batch=32, wait_ms=10),
    best={"tiny": Setting(2, 1, 4, 1), "base": Setting(2, 1, 2, 1)},
)
BENTOML = Peer(
    Contestant(
        "BentoML",
        (
            *(PEERS_PYTHON, "-m", "bentoml", "serve", "benchmarks.peers.bentoml_batch:FillMask"),
            *("--host", "127.0.0.1", "--port", PORT),
        ),
        {"BENTOML_DO_NOT_TRACK": "True"},
        "/predict",
        "application/json",
        named_list,
    ),
    natural=Setting(batch=32),
    best={"tiny": Setting(2, 1, 2), "base": Setting(2, 1, 4)},
)
RAY = Peer(
    _json(
        "Ray Serve",
        (PEERS_PYTHON, "-m", "benchmarks.peers.ray_batch"),
        "/",
        RAY_USAGE_STATS_ENABLED="0",
    ),
    natural=Setting(batch=32, wait_ms=10),
    best={"tiny": Setting(2, 1, 4, 1), "base": Setting(2, 1, 4, 1)},
    variants=(0, 1),
)
PEERS = (DOCS_PAGE, DOCS_BATCHING, FASTAPI, LITSERVE, MOSEC, BENTOML, RAY)
