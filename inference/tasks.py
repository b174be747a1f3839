"""Which task a model is for, told by its architecture, and the pipeline of a task."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PretrainedConfig
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.pipelines.base import Pipeline

from inference.sources import Source

# In this order a model's architecture is looked for; a later one may be more general.
TASKS = (
    *("fill-mask", "text-classification", "token-classification", "image-classification"),
    *("image-segmentation", "object-detection", "depth-estimation", "zero-shot-object-detection"),
    *("keypoint-matching", "mask-generation", "document-question-answering"),
    *("table-question-answering", "audio-classification", "automatic-speech-recognition"),
    *("text-to-audio", "video-classification", "zero-shot-image-classification"),
    "text-generation",
)
# Models without a head: by the name of what goes in first.
BARE = {"input_ids": "feature-extraction", "pixel_values": "image-feature-extraction"}
BARE_TASKS = {"ClapModel": "zero-shot-audio-classification"}
COMPONENTS = {
    "tokenizer": transformers.AutoTokenizer,
    "image_processor": transformers.AutoImageProcessor,
    "feature_extractor": transformers.AutoFeatureExtractor,
    "processor": transformers.AutoProcessor,
    "video_processor": transformers.AutoVideoProcessor,
}


def task_of(config: PretrainedConfig) -> str:
    """Tell the task from the architecture that the weights were saved with.

    Raises:
        ValueError: It is for none that is served.
    """
    architecture = (config.architectures or ["an unnamed architecture"])[0]
    for task in TASKS:
        if any(architecture in architectures(auto, config) for auto in autos(task)):
            return task
    if architecture in architectures(transformers.AutoModel, config):
        first = getattr(transformers, architecture).main_input_name
        if found := BARE_TASKS.get(architecture) or BARE.get(first):
            return found
    raise ValueError(f"no task is known for {architecture}; set TASK")


def pipeline_of(task: str, source: Source, device: str, config: PretrainedConfig) -> Pipeline:
    """Return the pipeline, in float32.

    Raises:
        ValueError: The model lacks weights for the task.
    """
    _, known, _ = PIPELINE_REGISTRY.check_task(task)
    fitting = [auto for auto in autos(task) if architectures(auto, config)]
    if not fitting:  # Donut, for one, is for many tasks
        fitting = [getattr(transformers, (config.architectures or [""])[0], autos(task)[0])]
    model, loading = fitting[0].from_pretrained(
        source.path, config=config, dtype="float32", output_loading_info=True, **source.weights
    )
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(f"the weights lack {', '.join(missing[:3])}: not a model for {task}")
    kind = getattr(transformers.pipelines, known["impl"].rsplit(".", 1)[-1])
    components = {
        name: _component(name, source, getattr(kind, f"_load_{name}"))
        for name in COMPONENTS
        if getattr(kind, f"_load_{name}") is not False
    }
    return transformers.pipeline(task, model=model, device=device, **components, **source.common)


def _component(name: str, source: Source, needed: bool | None) -> Any:
    """Return what the pipeline is to use as its tokenizer, processor, …; None: it has none.

    Args:
        name: Of the component.
        source: Of the model.
        needed: None: only some models have it.
    """
    try:
        return COMPONENTS[name].from_pretrained(source.path, **source.common)
    except (OSError, ValueError, ImportError):
        if needed:
            raise
        return None


def autos(task: str) -> tuple[Any, ...]:
    """Return the classes that load models for a task."""
    _, known, _ = PIPELINE_REGISTRY.check_task(task)
    found: tuple[Any, ...] = known["pt"]
    return found


def architectures(auto: Any, config: PretrainedConfig) -> tuple[str, ...]:
    """Return the names of the classes that `auto` makes of `config`."""
    names: str | tuple[str, ...] = auto._model_mapping._model_mapping.get(config.model_type, ())
    return (names,) if isinstance(names, str) else names
