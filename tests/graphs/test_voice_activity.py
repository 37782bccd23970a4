"""`voice_activity`: streamed sound with state kept by the server."""

from __future__ import annotations

import json
import subprocess
import sys
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

from flowserve.testing.serve import Served

pytestmark = pytest.mark.server

FRAME = 80  # samples


@pytest.fixture(scope="module")
def sound(root: Path) -> np.ndarray[Any, Any]:
    with wave.open(str(root / "graphs/voice_activity/talk.wav")) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    return samples.astype(np.float32) / 32767


def _speech(
    client: triton.InferenceServerClient, sound: np.ndarray[Any, Any], frames: Sequence[int], sequence: int
) -> np.ndarray[Any, Any]:
    """The answers of one stream that is sent in pieces of so many frames."""
    pieces, at = [], 0
    for n, count in enumerate(frames):
        chunk = sound[None, at : at + count * FRAME]
        at += count * FRAME
        audio = triton.InferInput("AUDIO", list(chunk.shape), "FP32")
        audio.set_data_from_numpy(chunk)
        flags = {"sequence_start": n == 0, "sequence_end": n == len(frames) - 1}
        pieces.append(client.infer("voice_activity", [audio], sequence_id=sequence, **flags).as_numpy("SPEECH")[0])
    assert at == len(sound)
    return np.concatenate(pieces)


@pytest.mark.parametrize("size", [1, 10, 37, 150])
def test_decisions_do_not_depend_on_the_segmentation_of_the_sound(
    client: triton.InferenceServerClient, sound: np.ndarray[Any, Any], size: int
) -> None:
    total = len(sound) // FRAME
    whole = _speech(client, sound, [total], 1)
    frames = [min(size, total - at) for at in range(0, total, size)]
    pieces = _speech(client, sound, frames, 2)
    np.testing.assert_allclose(pieces, whole, atol=1e-4)
    assert ((pieces > 0.5) == (whole > 0.5)).all()


def test_speech_is_detected_in_unseen_sound(
    client: triton.InferenceServerClient, sound: np.ndarray[Any, Any], root: Path
) -> None:
    right = np.array(json.loads((root / "graphs/voice_activity/talk.json").read_text()), bool)
    told = _speech(client, sound, [len(right)], 3) > 0.5
    assert (told == right).mean() >= 0.95


def test_the_client_prints_the_segments(served_graphs: Served, root: Path) -> None:
    command = [sys.executable, "graphs/voice_activity/stream.py", "graphs/voice_activity/talk.wav"]
    done = subprocess.run(
        [*command, served_graphs.address], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == " 1.07 s to  2.51 s\n 3.41 s to  4.80 s\n"
