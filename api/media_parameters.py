"""What a client may send for the tasks on images, sounds, videos, documents and tables."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from api.formats import LabelList, Strict, Template, Word
from api.media import Medium

Share = Annotated[float, Field(ge=0, le=1, strict=False)]
TopK = Annotated[int | None, Field(ge=1, description="Labels to return, best first.")]
Outputs = Literal["sigmoid", "softmax", "none"]


class ClassificationParameters(Strict):
    """Parameters of the pipelines that label images and sounds."""

    top_k: TopK = None
    function_to_apply: Outputs | None = Field(
        None, description="Makes scores of the model's outputs."
    )


class VideoClassificationParameters(ClassificationParameters):
    """Parameters of the video-classification pipeline."""

    num_frames: int | None = Field(None, ge=1, le=256, description="Frames that the model sees.")
    frame_sampling_rate: int | None = Field(None, ge=1, le=60, description="Take every n-th.")


class ObjectDetectionParameters(Strict):
    """Parameters of the object-detection pipeline."""

    threshold: Share | None = Field(None, description="Least score.")


class ImageSegmentationParameters(Strict):
    """Parameters of the image-segmentation pipeline."""

    subtask: Literal["panoptic", "instance", "semantic"] | None = None
    threshold: Share | None = Field(None, description="Least score.")
    mask_threshold: Share | None = None
    overlap_mask_area_threshold: Share | None = None


class DepthEstimationParameters(Strict):
    """What is returned of the depths."""

    predicted_depth: bool | None = Field(
        None, description="Also as numbers, a list of rows: many bytes."
    )


class ImageFeatureExtractionParameters(Strict):
    """Parameters of the image-feature-extraction pipeline."""

    pool: bool | None = Field(None, description="One vector for the image, not one for each patch.")


class ZeroShotParameters(Strict):
    """Parameters of the pipelines that tell images and sounds by labels of the client."""

    candidate_labels: LabelList = Field(description="Labels, as a list or separated by commas.")
    hypothesis_template: Template | None = Field(None, description="With {} for the label.")


class ZeroShotObjectDetectionParameters(Strict):
    """Parameters of the zero-shot-object-detection pipeline."""

    candidate_labels: LabelList = Field(description="Labels, as a list or separated by commas.")
    threshold: Share | None = Field(None, description="Least score.")
    top_k: int | None = Field(None, ge=1, description="Objects to return, best first.")


class ImagePair(Strict):
    """Two images of the same thing."""

    images: list[Medium] = Field(min_length=2, max_length=2)


class KeypointParameters(Strict):
    """Parameters of the keypoint-matching pipeline."""

    threshold: Share | None = Field(None, description="Least score.")


class MaskGenerationParameters(Strict):
    """Parameters of the mask-generation pipeline."""

    points_per_batch: int | None = Field(None, ge=1, le=1024)
    points_per_crop: int | None = Field(None, ge=1, le=32, description="On each side.")
    crops_n_layers: int | None = Field(None, ge=0, le=1)
    crop_overlap_ratio: Share | None = None
    pred_iou_thresh: Share | None = None
    stability_score_thresh: Share | None = None
    crops_nms_thresh: Share | None = None
    output_bboxes_mask: bool | None = None


Coordinate = Annotated[int, Field(ge=0, le=1000)]
WordBox = Annotated[
    tuple[Word, Annotated[tuple[Coordinate, ...], Field(strict=False, min_length=4, max_length=4)]],
    Field(strict=False),
]
WordBoxes = Annotated[list[WordBox], Field(min_length=1, max_length=10_000, fail_fast=True)]


class Document(Strict):
    """A question about a document."""

    image: Medium
    question: str = Field(max_length=2_000)
    word_boxes: WordBoxes | None = Field(
        None, description="Words and their boxes, 0 to 1000, instead of reading the image."
    )


class DocumentParameters(Strict):
    """Parameters of the document-question-answering pipeline."""

    top_k: int | None = Field(None, ge=1, le=100)
    doc_stride: int | None = Field(None, ge=1, le=100_000)
    max_answer_len: int | None = Field(None, ge=1, le=1_000)
    max_seq_len: int | None = Field(None, ge=8, le=100_000)
    max_question_len: int | None = Field(None, ge=1, le=100_000)
    handle_impossible_answer: bool | None = None
    lang: str | None = Field(None, pattern=r"^[a-zA-Z_+]{1,40}$", description="Of the words.")
    word_boxes: WordBoxes | None = None


def check_table(columns: dict[str, list[str]]) -> dict[str, list[str]]:
    """Refuse columns of different lengths."""
    if len({len(cells) for cells in columns.values()}) > 1:
        raise PydanticCustomError("table", "columns of different lengths")
    return columns


Cells = Annotated[list[Word], Field(min_length=1, max_length=1_000, fail_fast=True)]


class Table(Strict):
    """A question about a table."""

    query: str = Field(max_length=2_000)
    table: Annotated[
        dict[Word, Cells], Field(min_length=1, max_length=64), AfterValidator(check_table)
    ]


class TableParameters(Strict):
    """Parameters of the table-question-answering pipeline."""

    sequential: bool | None = None
    padding: Literal["do_not_pad", "longest", "max_length"] | None = None
    truncation: bool | Literal["drop_rows_to_fit", "do_not_truncate"] | None = None


class SpeechGeneration(Strict):
    """How a model that writes what it hears goes about it."""

    language: Word | None = None
    task: Literal["transcribe", "translate"] | None = None
    max_new_tokens: int | None = Field(None, ge=1, le=1024)
    num_beams: int | None = Field(None, ge=1, le=8)
    do_sample: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100, strict=False)


class SpeechParameters(Strict):
    """Parameters of the automatic-speech-recognition pipeline."""

    return_timestamps: bool | Literal["word", "char"] | None = None
    chunk_length_s: float | None = Field(None, ge=5, le=60, strict=False)
    stride_length_s: float | None = Field(
        None, ge=0, le=15, strict=False, description="Overlap on each side: a quarter of a chunk."
    )
    generate_kwargs: SpeechGeneration | None = None


class SpokenParameters(Strict):
    """How a model that speaks goes about it."""

    do_sample: bool | None = None
    max_new_tokens: int | None = Field(None, ge=1, le=4096)
    num_beams: int | None = Field(None, ge=1, le=8)
    temperature: float | None = Field(None, gt=0, le=100, strict=False)
    top_k: int | None = Field(None, ge=1)
    top_p: float | None = Field(None, gt=0, le=1, strict=False)
