"""Small random models of images, sounds, videos and tables, saved with their processors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import transformers as tf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

RATE_HZ = 16_000
LABELS = {number: f"label {number}" for number in range(7)}
NAMES = {"id2label": LABELS, "label2id": {name: number for number, name in LABELS.items()}}
LAYERS: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
SMALL = {"height": 32, "width": 32}


def png(
    seed: int, width: int = 60, height: int = 40, form: str = "PNG", *, turned: bool = False
) -> bytes:
    """Return an image file of coarse random squares, held upright or not."""
    squares = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), np.uint8)
    file = BytesIO()
    image = Image.fromarray(squares).resize((width, height), Image.Resampling.NEAREST)
    orientation = image.getexif()
    orientation[0x0112] = 6 if turned else 1
    image.save(file, form, exif=orientation)
    return file.getvalue()


def wav(seed: int, seconds: float = 0.5, rate_hz: int = RATE_HZ, **options: Any) -> bytes:
    """Return a sound file of noise."""
    channels = options.pop("channels", 1)
    shape = (int(seconds * rate_hz), channels)
    noise = np.random.default_rng(seed).normal(0, 0.2, shape)
    file = BytesIO()
    soundfile.write(file, noise.clip(-1, 1), rate_hz, **{"format": "WAV", **options})
    return file.getvalue()


def words(text: str = "") -> Any:
    """Return a tokenizer that knows a few words and letters."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]  # OWL-ViT takes what begins with 0 for padding
    known = [*special, *"abcdefghijklmnopqrstuvwxyz0123456789?.,", *text.split()]
    table = {word: number for number, word in enumerate(dict.fromkeys(known))}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> $B:1 </s>:1", [("<s>", 1), ("</s>", 2)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **names,
        cls_token="<s>",
        sep_token="</s>",
        model_max_length=64,
    )


def image_classification(folder: Path) -> None:
    config = tf.ViTConfig(image_size=32, patch_size=8, **LAYERS, **NAMES)
    save(folder, tf.ViTForImageClassification(config), tf.ViTImageProcessor(size=SMALL))


def image_feature_extraction(folder: Path) -> None:
    config = tf.ViTConfig(image_size=32, patch_size=8, **LAYERS)
    save(folder, tf.ViTModel(config), tf.ViTImageProcessor(size=SMALL))


def object_detection(folder: Path) -> None:
    config = tf.YolosConfig(
        image_size=[64, 96], patch_size=16, num_detection_tokens=5, **LAYERS, **NAMES
    )
    size = {"shortest_edge": 64, "longest_edge": 96}
    save(folder, tf.YolosForObjectDetection(config), tf.YolosImageProcessor(size=size))


def image_segmentation(folder: Path) -> None:
    config = tf.SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
        **NAMES,
    )
    processor = tf.SegformerImageProcessor(size={"height": 64, "width": 64})
    save(folder, tf.SegformerForSemanticSegmentation(config), processor)


def depth_estimation(folder: Path) -> None:
    config = tf.GLPNConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=8,
    )
    save(folder, tf.GLPNForDepthEstimation(config), tf.GLPNImageProcessor())


def zero_shot_image_classification(folder: Path) -> None:
    config = tf.CLIPConfig(
        text_config={**LAYERS, "vocab_size": 99, "eos_token_id": 2, "bos_token_id": 1},
        vision_config={**LAYERS, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    processor = tf.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=SMALL)
    save(folder, tf.CLIPModel(config), processor, words())


def zero_shot_object_detection(folder: Path) -> None:
    config = tf.OwlViTConfig(
        text_config={**LAYERS, "vocab_size": 99, "max_position_embeddings": 64},
        vision_config={**LAYERS, "image_size": 32, "patch_size": 8},
        projection_dim=32,
    )
    processor = tf.OwlViTImageProcessor(size=SMALL)
    save(folder, tf.OwlViTForObjectDetection(config), processor, words())


def audio_classification(folder: Path) -> None:
    model = tf.Wav2Vec2ForSequenceClassification(speech_config(**NAMES))
    save(folder, model, tf.Wav2Vec2FeatureExtractor())


def speech_config(**more: Any) -> Any:
    return tf.Wav2Vec2Config(
        **LAYERS,
        conv_dim=(16, 16, 16),
        conv_kernel=(10, 3, 3),
        conv_stride=(5, 4, 4),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=16,
        **more,
    )


def automatic_speech_recognition(folder: Path) -> None:
    folder.mkdir(parents=True)
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJ"]
    table = folder / "letters.json"
    table.write_text(json.dumps({letter: number for number, letter in enumerate(letters)}))
    model = tf.Wav2Vec2ForCTC(speech_config(vocab_size=len(letters), pad_token_id=0))
    save(folder, model, tf.Wav2Vec2FeatureExtractor(), tf.Wav2Vec2CTCTokenizer(str(table)))


def whisper(folder: Path) -> None:
    config = tf.WhisperConfig(
        vocab_size=99,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_target_positions=300,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
    )
    model = tf.WhisperForConditionalGeneration(config)
    model.generation_config.update(
        max_length=12,
        lang_to_id={"<|en|>": 5, "<|de|>": 6},
        task_to_id={"transcribe": 7, "translate": 8},
        no_timestamps_token_id=20,
        is_multilingual=True,
    )
    save(folder, model, tf.WhisperFeatureExtractor(), tf.WhisperTokenizer())


def zero_shot_audio_classification(folder: Path) -> None:
    audio = {
        "patch_embeds_hidden_size": 16,
        "hidden_size": 32,
        "depths": [1, 1],
        "num_attention_heads": [2, 2],
        "num_mel_bins": 64,
        "spec_size": 256,
        "window_size": 8,
    }
    config = tf.ClapConfig(
        text_config={**LAYERS, "vocab_size": 99, "max_position_embeddings": 80, "pad_token_id": 0},
        audio_config=audio,
        projection_dim=16,
    )
    save(folder, tf.ClapModel(config), tf.ClapFeatureExtractor(truncation="rand_trunc"), words())


def text_to_audio(folder: Path) -> None:
    folder.mkdir(parents=True)
    letters = dict.fromkeys(["_", *"abcdefghijklmnopqrstuvwxyz ,.?!'"])
    table = folder / "letters.json"
    table.write_text(json.dumps({letter: number for number, letter in enumerate(letters)}))
    config = tf.VitsConfig(
        vocab_size=len(letters),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=16,
        flow_size=16,
        spectrogram_bins=9,
        prior_encoder_num_flows=1,
        prior_encoder_num_wavenet_layers=1,
        posterior_encoder_num_wavenet_layers=1,
        duration_predictor_num_flows=1,
        duration_predictor_flow_bins=4,
        depth_separable_num_layers=1,
        upsample_initial_channel=16,
        upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1]],
    )
    tokenizer = tf.VitsTokenizer(str(table), phonemize=False, is_uroman=False)
    save(folder, tf.VitsModel(config), tokenizer)


def video_classification(folder: Path) -> None:
    config = tf.VideoMAEConfig(
        image_size=32, patch_size=8, num_frames=4, tubelet_size=2, **LAYERS, **NAMES
    )
    processor = tf.VideoMAEImageProcessor(size={"shortest_edge": 32}, crop_size=SMALL)
    save(folder, tf.VideoMAEForVideoClassification(config), processor)


def table_question_answering(folder: Path) -> None:
    folder.mkdir(parents=True)
    known = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "[EMPTY]",
        *"abcdefghijklmnop0123456789?",
    ]
    table = folder / "words.txt"
    table.write_text("\n".join(known))
    config = tf.TapasConfig(
        vocab_size=len(known),
        **LAYERS,
        max_position_embeddings=128,
        num_aggregation_labels=4,
        aggregation_labels={0: "NONE", 1: "SUM", 2: "AVERAGE", 3: "COUNT"},
        no_aggregation_label_index=0,
    )
    tokenizer = tf.TapasTokenizer(str(table), model_max_length=128)
    save(folder, tf.TapasForQuestionAnswering(config), tokenizer)


def document_question_answering(folder: Path) -> None:
    config = tf.LayoutLMConfig(vocab_size=99, **LAYERS, max_position_embeddings=80)
    save(folder, tf.LayoutLMForQuestionAnswering(config), words("total amount"))


def keypoint_matching(folder: Path) -> None:
    config = tf.SuperGlueConfig(
        keypoint_detector_config={
            "model_type": "superpoint",
            "encoder_hidden_sizes": [8, 8, 8, 16],
            "decoder_hidden_size": 16,
            "keypoint_decoder_dim": 65,
            "descriptor_decoder_dim": 16,
            "max_keypoints": 20,
        },
        hidden_size=16,
        keypoint_encoder_sizes=[8, 16],
        gnn_layers_types=["self", "cross"],
        num_attention_heads=2,
    )
    processor = tf.SuperGlueImageProcessor(size={"height": 48, "width": 64})
    save(folder, tf.SuperGlueForKeypointMatching(config), processor)


def save(folder: Path, model: Any, *parts: Any) -> None:
    """Save a model whose weights are far enough from zero that inputs differ."""
    generator = torch.Generator().manual_seed(3)
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.1, generator=generator)
    for part in (model, *parts):
        part.save_pretrained(folder)


BUILDERS: Mapping[str, Callable[[Path], None]] = {
    "image-classification": image_classification,
    "image-feature-extraction": image_feature_extraction,
    "object-detection": object_detection,
    "image-segmentation": image_segmentation,
    "depth-estimation": depth_estimation,
    "zero-shot-image-classification": zero_shot_image_classification,
    "zero-shot-object-detection": zero_shot_object_detection,
    "audio-classification": audio_classification,
    "automatic-speech-recognition": automatic_speech_recognition,
    "zero-shot-audio-classification": zero_shot_audio_classification,
    "text-to-audio": text_to_audio,
    "video-classification": video_classification,
    "table-question-answering": table_question_answering,
    "document-question-answering": document_question_answering,
    "keypoint-matching": keypoint_matching,
    "whisper": whisper,
}
