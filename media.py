"""Images, sounds and videos: what may enter, by its header, and how it is decoded.

The checks run before the queue, the decoders in the model thread. There is no torch here.
"""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import soundfile
import soxr
from PIL import Image, ImageOps

from errors import Empty, Rejected, TooLarge

MAX_PIXELS = 50_000_000
MAX_VIDEO_PIXELS = 200_000_000  # of all frames that are wanted
MAX_RATIO = 50  # of the sides: where the shorter is resized to hundreds, the longer grows with it
MAX_SECONDS = 1_800
MAX_SAMPLES = 100_000_000  # of all channels
MAX_CHANNELS = 16
RATES_HZ = range(1_000, 400_001)
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
AUDIO_FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3")
# A demuxer that is named does not guess: playlists would make it open files and addresses.
DEMUXERS = {b"ftyp": "mov", b"\x1aE\xdf\xa3": "matroska", b"AVI ": "avi"}
FAULTS = (
    *(OSError, ValueError, SyntaxError, TypeError, EOFError, LookupError, ArithmeticError),
    *(AttributeError, RuntimeError, struct.error, zlib.error),
)  # what decoders raise on broken files

Image.MAX_IMAGE_PIXELS = None  # ours is lower, and no mere warning


def check_image(data: bytes) -> None:
    """Refuse what is no image, or too large a one.

    Raises:
        Empty: There is nothing.
        TooLarge: It has more than MAX_PIXELS.
        Rejected: It is in no format that is read, or has one side far longer than the other.
    """
    with _opened(data) as image:
        width, height = image.size
    if max(width, height) > MAX_RATIO * min(width, height):
        raise Rejected(f"the image has {width} × {height} pixels: its sides are too unequal")
    if width * height > MAX_PIXELS:
        raise TooLarge(f"the image has {width} × {height} pixels, and {MAX_PIXELS} fit")


def image(data: bytes) -> Image.Image:
    """Decode an image to RGB, upright; of an animation, the first frame.

    Raises:
        Rejected: It is cut off or broken.
    """
    opened = _opened(data)
    try:
        return ImageOps.exif_transpose(opened).convert("RGB")
    except FAULTS:
        raise Rejected("the image is cut off or broken") from None


def check_audio(data: bytes) -> None:
    """Refuse what is no sound, or too long a one.

    Raises:
        Empty: There is nothing.
        TooLarge: It has more than MAX_SECONDS or MAX_SAMPLES.
        Rejected: It is in no format that is read, or has no samples.
    """
    if not data:
        raise Empty("the input is empty")
    try:
        about = soundfile.info(BytesIO(data))
        known = about.format in AUDIO_FORMATS
    except FAULTS:
        known = False
    if not known:
        raise Rejected("this is no audio that can be read: send WAV, FLAC, OGG or MP3")
    if about.frames < 1:
        raise Rejected("the audio has no samples")
    if about.channels > MAX_CHANNELS:
        raise Rejected(f"the audio has {about.channels} channels, and at most {MAX_CHANNELS} fit")
    if about.samplerate not in RATES_HZ:
        raise Rejected(f"the audio has {about.samplerate} samples per second")
    if about.duration > MAX_SECONDS or about.frames * about.channels > MAX_SAMPLES:
        raise TooLarge(
            f"the audio lasts {about.duration:.0f} s, and at most {MAX_SECONDS} s "
            f"and {MAX_SAMPLES} samples fit"
        )


def audio(data: bytes, rate_hz: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Decode a sound: [samples], float32, one channel, at `rate_hz`.

    Raises:
        Rejected: It is broken, or too short to have a sample.
    """
    try:
        channels, own_rate_hz = soundfile.read(BytesIO(data), dtype="float32", always_2d=True)
        samples = np.ascontiguousarray(channels.mean(axis=1))
        if own_rate_hz != rate_hz:
            samples = soxr.resample(samples, own_rate_hz, rate_hz)
    except FAULTS:
        raise Rejected("the audio is cut off or broken") from None
    if not samples.size:
        raise Rejected(f"the audio has no sample at {rate_hz} Hz")
    if not np.isfinite(samples).all():
        raise Rejected("the audio has samples that are not finite")
    return samples


def check_video(data: bytes) -> None:
    """Refuse what is no video.

    Raises:
        Empty: There is nothing.
        Rejected: It is in no format that is read.
    """
    if not data:
        raise Empty("the input is empty")
    _demuxer(data)


def video(data: bytes, frames: int, step: int) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Decode `frames` frames, every `step`-th from the first on: each [height, width, 3].

    Raises:
        Rejected: It is broken, or has fewer.
        TooLarge: They have more than MAX_VIDEO_PIXELS together.
    """
    import av  # only this task needs it

    wanted = set(np.linspace(0, frames * step - 1, num=frames, dtype=np.int64).tolist())
    found: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
    try:
        with av.open(BytesIO(data), "r", _demuxer(data)) as container:
            for index, frame in enumerate(container.decode(video=0)):
                if frame.width * frame.height * frames > MAX_VIDEO_PIXELS:
                    raise TooLarge(f"{frames} frames of this video have too many pixels")
                if index in wanted:
                    found.append(frame.to_ndarray(format="rgb24"))
                if len(found) == len(wanted):
                    return found
    except (*FAULTS, av.FFmpegError):
        raise Rejected("the video is cut off or broken") from None
    raise Rejected(f"the video has {len(found)} of the {frames} frames that are wanted")


def _opened(data: bytes) -> Image.Image:
    """Read the header of an image."""
    if not data:
        raise Empty("the input is empty")
    try:
        return Image.open(BytesIO(data), formats=IMAGE_FORMATS)
    except FAULTS:
        formats = ", ".join(IMAGE_FORMATS)
        raise Rejected(f"this is no image that can be read: send {formats}") from None


def _demuxer(data: bytes) -> str:
    for magic, name in DEMUXERS.items():
        if magic in data[:12]:
            return name
    raise Rejected("this is no video that can be read: send MP4, WebM, Matroska or AVI")
