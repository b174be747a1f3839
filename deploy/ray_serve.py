"""onequeue on Ray Serve: the whole application, with one worker and one model, in every replica.

    serve run deploy.ray_serve:app num_replicas=2 num_gpus=1
    serve run deploy.ray_serve:app max_replicas=8 num_cpus=4

Settings are read where the application is built, from the environment and CONFIG_FILE as ever, and
travel to the replicas. Ray places, watches and replaces those; docs/scaling.md tells how.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from starlette.applications import Starlette

from config import Settings, load_settings
from lifecycle import FLUSH_S, end_process
from queueing import State
from server import create_app
from service import Service
from telemetry import configure_logging

HEALTH_CHECK_PERIOD_S = 1.0
LOOK_EVERY_S = 0.1  # whether the model is loaded
GRACE_S = 2.0  # beyond DRAIN_TIMEOUT_S, before Ray kills
WAITING = 1000  # requests that each proxy keeps while no replica takes any; then it refuses them


class Options(BaseModel):
    """What Ray is told of the deployment, under Ray's names; what is left out is Ray's default."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    num_replicas: int | None = None
    """How many, unless there is `max_replicas`."""
    num_cpus: float = 1
    """Of each replica; torch has as many threads, unless NUM_THREADS says otherwise."""
    num_gpus: float = 0
    """Of each replica."""
    max_ongoing_requests: int | None = None
    """Of each replica; by default more than its queue holds, so that it is it that refuses."""
    max_replicas: int | None = None
    """With it, Ray adds and removes replicas."""
    min_replicas: int = 1
    """The fewest that are left."""
    target_ongoing_requests: float | None = None
    """Of each replica, on average; by default MAX_BATCH_SIZE."""
    upscale_delay_s: float = 30
    """How long there must be too much to do."""
    downscale_delay_s: float = 600
    """How long there must be too little."""

    def scaling(self, batch_size: int) -> dict[str, Any]:
        """Return how many replicas there are, as Ray wants to be told."""
        if self.max_replicas is None:
            return {"num_replicas": self.num_replicas or 1}
        names = {"max_replicas", "min_replicas", "upscale_delay_s", "downscale_delay_s"}
        target = self.target_ongoing_requests or batch_size
        config = {**self.model_dump(include=names), "target_ongoing_requests": target}
        return {"autoscaling_config": config}


class Replica:
    """A replica: the application, and how it fares."""

    def __init__(self, settings: Settings, create: Callable[[Settings], Starlette]) -> None:
        self._settings = settings
        self._create = create

    def __serve_build_asgi_app__(self) -> Starlette:
        """Return the application; Ray runs its lifespan."""
        configure_logging(self._settings)
        self._app = self._create(self._settings)
        return self._app

    async def check_health(self) -> None:
        """Wait until the model is loaded: before its first check, a replica gets no requests.

        Once the worker makes no progress, all who wait are refused and the process ends, as it
        does under uvicorn. Three failed checks would do too, but a dead replica answers fastest,
        and until then would be sent most requests.

        Raises:
            RuntimeError: The worker makes no progress.
        """
        behind: Service = self._app.state.service
        while behind.queue.state is State.LOADING:  # noqa: ASYNC110 - once in its life
            await asyncio.sleep(LOOK_EVERY_S)
        if not behind.worker.alive():
            behind.queue.close()
            asyncio.get_running_loop().call_later(FLUSH_S, end_process, 1)
            raise RuntimeError("the worker makes no progress; the log of the replica says why")


def application(
    options: Options, settings: Settings, create: Callable[[Settings], Starlette] = create_app
) -> serve.Application:
    """Return a deployment of what `create` makes of `settings`, bound to be run."""
    if "num_threads" not in settings.model_fields_set:
        settings = settings.model_copy(update={"num_threads": max(1, int(options.num_cpus))})
    full = settings.max_queue_size + 3 * settings.max_batch_size  # and batches on their way
    deployment = serve.deployment(
        name="onequeue",
        ray_actor_options=options.model_dump(include={"num_cpus", "num_gpus"}),
        max_ongoing_requests=options.max_ongoing_requests or full,
        max_queued_requests=WAITING,
        backpressure_config={"status_code": settings.overload_status, "retry_after_s": 1},
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        graceful_shutdown_timeout_s=settings.drain_timeout_s + GRACE_S,
        logging_config={"enable_access_log": False},  # our log says more
        **options.scaling(settings.max_batch_size),
    )
    return deployment(serve.ingress()(Replica)).bind(settings, create)


def app(options: Options) -> serve.Application:  # Ray reads this annotation: no string may do
    """Return what `serve run` and `serve deploy` run.

    Raises:
        ConfigurationError: A setting cannot be used.
    """
    return application(options, load_settings())
