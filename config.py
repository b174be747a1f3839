"""Settings: the environment over YAML file(s) over defaults.

Nothing else in onequeue reads the environment.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)
from pydantic_settings.sources import InitSettingsSource

from cpus import available_cpus

YAML_VALUE_ERRORS = (ValueError, LookupError, AttributeError, TypeError)  # of dates, tags, numbers


class ConfigurationError(Exception):
    """A setting that cannot be used; its text is one line that names key and value."""


def alias(name: str) -> Any:
    """Let `name` also be set under the name that Hugging Face's own servers use."""
    return Field(validation_alias=AliasChoices(name, f"hf_{name}"))


Task = Literal[
    "text-generation",
    "fill-mask",
    "text-classification",
    "token-classification",
    "zero-shot-classification",
    "feature-extraction",
    "image-classification",
    "image-segmentation",
    "object-detection",
    "depth-estimation",
    "image-feature-extraction",
    "mask-generation",
    "keypoint-matching",
    "zero-shot-image-classification",
    "zero-shot-object-detection",
    "document-question-answering",
    "table-question-answering",
    "audio-classification",
    "zero-shot-audio-classification",
    "automatic-speech-recognition",
    "text-to-audio",
    "video-classification",
]
TASK_ALIASES = {
    "ner": "token-classification",
    "sentiment-analysis": "text-classification",
    "sentence-similarity": "feature-extraction",
    "text-to-speech": "text-to-audio",
}


def task_name(value: Any) -> Any:
    """Return the one name of a task that has several."""
    return TASK_ALIASES.get(value, value) if isinstance(value, str) else value


def number(value: Any) -> Any:
    """Read digits as a number, for the sake of the environment."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def each_key(keys: SecretStr) -> list[str]:
    """Return the keys that one setting holds, separated by commas."""
    return [key.strip() for key in keys.get_secret_value().split(",")]


def usable_keys(keys: SecretStr) -> SecretStr:
    """Refuse a key that no client could send."""
    if not all(re.fullmatch(r"[!-~]+", key) for key in each_key(keys)):
        raise ValueError("each key must be visible ASCII characters without spaces, at least one")
    return keys


def prepare_allocator() -> None:
    """Let torch's allocator on GPUs grow its segments, unless the user chose; before its import."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


class Settings(BaseSettings):
    """Every option of the server; the environment variable of a field is its name in upper case."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_ignore_empty=True,
        populate_by_name=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    model_id: Annotated[str, alias("model_id")] = "models/tiny-fill-mask"
    """Hub id or folder; looked for in the working directory, then beside this file."""
    task: Annotated[Task | None, BeforeValidator(task_name), alias("task")] = None
    """A transformers pipeline task; by default what the model was saved for."""
    revision: Annotated[str | None, alias("revision")] = None
    """Branch, tag or commit of a hub model."""
    allow_pickle: bool = False
    """Load pickled weights where there are no safetensors; a pickle can run any code."""
    trust_remote_code: Annotated[bool, alias("trust_remote_code")] = False
    """Run Python code that comes with the model."""
    device: str = Field("auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?|xpu(:\d+)?)$")
    """Where the model runs: cpu, cuda, cuda:1, mps, xpu."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    """float32, bfloat16, float16, or int8 on a CPU; auto: float32 on CPU, as stored elsewhere."""
    device_map: str | None = None
    """auto: spread a model larger than one device over several; needs accelerate."""
    model_kwargs: dict[str, Any] = {}
    """JSON object of further arguments of from_pretrained, such as quantization_config."""
    max_batch_size: int = Field(32, ge=1, le=4096)
    """Inputs per batch; texts that are generated at a time."""
    batch_wait_ms: float = Field(1.0, ge=0, le=1000)
    """How long a batch may wait for company, from the moment its first input was queued."""
    max_batch_tokens: int = Field(16384, ge=1)
    """Tokens per forward pass, with the padding where inputs are padded."""
    max_new_tokens: int = Field(4096, ge=1)
    """Ceiling of what a request may have generated."""
    cache_tokens: int = Field(16384, ge=32)
    """Tokens whose keys and values a generating model keeps, of all requests together."""
    max_queue_size: int = Field(512, ge=1)
    """Queued inputs beyond which requests are refused."""
    request_timeout_s: float = Field(30.0, gt=0, le=86400)
    """End-to-end deadline of a request before 504."""
    max_inputs_per_request: int = Field(128, ge=1)
    """Length of a list of inputs before 413."""
    max_body_bytes: int = Field(2_000_000, ge=1)
    """Size of a request body before 413."""
    api_key: Annotated[SecretStr, AfterValidator(usable_keys)] | None = None
    """Bearer key that inference asks for, or several, separated by commas."""
    admin_key: Annotated[SecretStr, AfterValidator(usable_keys)] | None = None
    """Bearer key of /admin/reload, which is not there without one."""
    metrics_key: Annotated[SecretStr, AfterValidator(usable_keys)] | None = None
    """Bearer key that /metrics asks for; without one, it is open like the probes."""
    cors_origins: str | None = Field(
        None, pattern=r"^\*$|^https?://[^/\s,]+(, *https?://[^/\s,]+)*$"
    )
    """Origins of pages in browsers that may ask, separated by commas, or *."""
    overload_status: Annotated[Literal[503, 429], BeforeValidator(number)] = 503
    """Status of the answer when the queue is full: 503 or 429."""
    drain_timeout_s: float = Field(30.0, ge=0, le=86400)
    """How long a stopping server may take to finish what it admitted."""
    watchdog_s: float = Field(120.0, gt=0)
    """Age of a call of the model beyond which /livez answers 503 and the process ends."""
    memory_check_batches: int = Field(1000, ge=1)
    """Batches after which a GPU's memory is looked at, and emptied of what nothing uses."""
    num_threads: int = Field(default_factory=available_cpus, ge=1, le=1024)
    """Intra-op threads of torch."""
    log_format: Literal["text", "json"] = "text"
    """text for people, json (a line per record) for machines."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe records shown: debug, info, warning, error."""
    config_file: str | None = None
    """YAML file, or several separated by commas; later ones win."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources: arguments, environment, YAML files."""
        files = InitSettingsSource(settings_cls, _read_files(os.environ.get("CONFIG_FILE", "")))
        return init_settings, env_settings, files


def _read_files(paths: str) -> dict[str, Any]:
    """Merge the YAML files named in `paths`, separated by commas.

    Raises:
        ConfigurationError: a file is missing, is not YAML, or is not a mapping of settings.
    """
    merged: dict[str, Any] = {}
    for path in filter(None, map(str.strip, paths.split(","))):
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError, RecursionError, *YAML_VALUE_ERRORS) as error:
            raise ConfigurationError(
                f"CONFIG_FILE: {path}: {' '.join(str(error).split())}"
            ) from error
        if not isinstance(values, dict | None):
            kind = type(values).__name__
            raise ConfigurationError(
                f"CONFIG_FILE: {path}: not `setting: value` lines but a {kind}"
            )
        merged |= {str(name): value for name, value in (values or {}).items()}
    if "config_file" in merged:
        raise ConfigurationError("config_file: a file cannot name further files")
    return merged


def load_settings() -> Settings:
    """Read the settings.

    Raises:
        ConfigurationError: a key is unknown or a value cannot be used.
    """
    for name in ("API_KEY", "ADMIN_KEY", "METRICS_KEY"):
        if os.environ.get(name) == "":
            raise ConfigurationError(f"{name.lower()}='': unset it if no key is wanted")
    try:
        return Settings()
    except SettingsError as error:  # no JSON where there has to be
        raise ConfigurationError(f"{error}: {error.__cause__}") from error
    except ValidationError as error:
        raise ConfigurationError("; ".join(map(_describe, error.errors()))) from error


def _describe(fault: ErrorDetails) -> str:
    reason = "there is no such setting" if fault["type"] == "extra_forbidden" else fault["msg"]
    name = ".".join(map(str, fault["loc"]))
    value = "***" if "key" in name.lower() else repr(fault["input"])
    return f"{name}={value}: {reason}"
