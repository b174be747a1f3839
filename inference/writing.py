"""Answers of a pipeline as JSON: numbers, images and sounds."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
import soundfile
import torch
from PIL import Image

from errors import ModelFailed


def written(task: str, output: Any, parameters: Mapping[str, Any]) -> Any:
    """Return the JSON-ready answer of a pipeline.

    Raises:
        ModelFailed: A sound is not made of finite numbers.
    """
    if task == "text-to-audio":
        return _sound(output["audio"], output["sampling_rate"])
    if task == "depth-estimation" and not parameters.get("predicted_depth"):
        output = {"depth": output["depth"]}
    return plain(output)


def plain(value: Any) -> Any:
    """Return `value` in words of JSON: images and masks as base64 PNG, what is not finite as null.

    Raises:
        TypeError: There is no word for it.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, Image.Image):
        return _png(value)
    if isinstance(value, torch.Tensor):
        value = (value.float() if value.is_floating_point() else value).cpu().numpy()
    if isinstance(value, np.ndarray | np.generic):
        return _array(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _array(array: Any) -> Any:
    if array.dtype == bool and array.ndim == 2:
        return _png(Image.fromarray(array.astype(np.uint8) * 255))
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return plain(array.tolist())
    return array.tolist()


def _png(image: Image.Image) -> str:
    file = BytesIO()
    image.save(file, "PNG")
    return b64encode(file.getvalue()).decode()


def _sound(samples: Any, rate_hz: int) -> dict[str, Any]:
    """Return a WAV file of 16 bits in base64, of [samples] or [channels, samples]."""
    if not np.isfinite(samples).all():
        raise ModelFailed("the model gave no finite numbers for this input")
    file = BytesIO()
    soundfile.write(file, np.atleast_2d(samples).T, rate_hz, format="WAV", subtype="PCM_16")
    return {"audio": b64encode(file.getvalue()).decode(), "sampling_rate": rate_hz}
