"""Streams a WAV file to `voice_activity`, a tenth of a second at a time, and prints when somebody speaks.

    python graphs/voice_activity/stream.py graphs/voice_activity/talk.wav localhost:8000

Decided here: what of the answers is called a segment. Needs numpy and tritonclient.
"""

from __future__ import annotations

import sys
import uuid
import wave
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import tritonclient.http as triton

RATE = 8000
CHUNK = RATE // 10  # of 10 ms each, which is what one answer is about
GAP, SHORTEST = 20, 10  # hundredths of a second: shorter silences and shorter sounds do not count


def read(path: str) -> npt.NDArray[np.float32]:
    """The samples, from -1 to 1."""
    with wave.open(path) as file:
        if (file.getnchannels(), file.getsampwidth(), file.getframerate()) != (1, 2, RATE):
            sys.exit(f"{path}: wanted one channel of 16 bits, {RATE} times a second")
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    whole = len(samples) // 80 * 80
    return samples[:whole].astype(np.float32) / 32767


def stream(client: triton.InferenceServerClient, sound: npt.NDArray[np.float32]) -> Iterator[float]:
    """The probability of speech for every 10 ms, as the answers come."""
    sequence = str(uuid.uuid4())
    for start in range(0, len(sound), CHUNK):
        chunk = sound[start : start + CHUNK][None]
        audio = triton.InferInput("AUDIO", list(chunk.shape), "FP32")
        audio.set_data_from_numpy(chunk)
        answer = client.infer(
            "voice_activity",
            [audio],
            sequence_id=sequence,
            sequence_start=start == 0,
            sequence_end=start + CHUNK >= len(sound),
        )
        yield from answer.as_numpy("SPEECH")[0].tolist()


def segments(probabilities: Iterator[float]) -> Iterator[tuple[float, float]]:
    """Begin and end in seconds of everything that is said, told when it is over."""
    begin = end = -1
    frame = 0
    for frame, probability in enumerate(probabilities):
        if probability > 0.5:
            begin, end = (frame if begin < 0 else begin), frame + 1
        elif begin >= 0 and frame - end >= GAP:
            if end - begin >= SHORTEST:
                yield begin / 100, end / 100
            begin = -1
    if begin >= 0 and end - begin >= SHORTEST:
        yield begin / 100, end / 100


def main() -> None:
    path, url = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "localhost:8000"
    for begin, end in segments(stream(triton.InferenceServerClient(url), read(path))):
        print(f"{begin:5.2f} s to {end:5.2f} s", flush=True)


if __name__ == "__main__":
    main()
