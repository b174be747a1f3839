"""Where a model's files are, and how they may be loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from config import Settings

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Source:
    """The files of a model.

    Attributes:
        path: Folder of a local model, or id of a hub model.
        common: Arguments of whatever loads one of them.
        weights: Arguments of what loads the weights.
    """

    path: str
    common: Mapping[str, Any]
    weights: Mapping[str, Any]

    def file(self, name: str) -> str | None:
        """Return the path of a file of the model, or None: it has none of that name."""
        found: str | None = cached_file(
            self.path,
            name,
            revision=self.common["revision"],
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return found


def source_of(settings: Settings) -> Source:
    """Return the files of the model named in `settings`.

    Raises:
        ValueError: They should be in a folder that is not there.
    """
    common = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
    kind = {} if settings.allow_pickle else {"use_safetensors": True}
    return Source(_path(settings.model_id), common, {**common, **kind})


def _path(model_id: str) -> str:
    for folder in (Path(model_id), ROOT / model_id):
        if folder.is_dir():
            return str(folder)
    if model_id.startswith((".", "/", "~")):
        raise ValueError("there is no such folder")
    return model_id
