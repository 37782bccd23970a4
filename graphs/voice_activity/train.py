"""Trains `voice_activity` and writes its model.onnx; talk.wav and talk.json beside it are sound that it never heard.

    python graphs/voice_activity/train.py

Decided here: what the made-up sound is (something like syllables with a pitch and formants, in phrases with pauses
between them, over noise, hum and clicks), and the network: the strength of twenty bands of each 10 ms, and one small
GRU. Seeded; a few minutes. Needs numpy and onnx.
"""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Floats = npt.NDArray[np.float32]

HERE = Path(__file__).resolve().parent
SEED = 20265
RATE = 8000  # samples a second
HOP, WINDOW = 80, 200  # 10 ms, and the 25 ms that each of them is heard with
TAIL = WINDOW - HOP
BINS, BANDS, HIDDEN = 100, 20, 16
CLIPS, HELD_OUT, SECONDS = 800, 80, 3
STEPS, BATCH = 700, 32


# ------------------------------------------------------------------------------------------------------------- sound


def some_syllable(rng: np.random.Generator, samples: int) -> Floats:
    """A voiced sound that fades in and out, now and then with a hiss before it."""
    time = np.arange(samples) / RATE
    pitch = rng.uniform(85, 260) * (
        1 + rng.uniform(-0.15, 0.15) * time / time[-1] + 0.01 * np.sin(2 * np.pi * 5 * time)
    )
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    formants = rng.uniform((250, 800, 2000), (850, 2000, 3200))
    sound = np.zeros(samples)
    for harmonic in range(1, int(3600 / pitch.max())):
        at = harmonic * pitch.mean()
        strength = sum(np.exp(-(((at - formant) / 180) ** 2)) / (1 + k) for k, formant in enumerate(formants))
        sound += (strength + 0.03) * np.sin(harmonic * phase + rng.uniform(0, 6))
    sound *= np.hanning(samples) ** 0.4
    if rng.random() < 0.4:
        hiss = np.diff(rng.normal(size=samples + 1)) * 0.3
        begins = np.clip(1 - time / 0.06, 0, 1)
        sound = sound * (1 - begins) + hiss * begins
    found: Floats = (sound / (np.abs(sound).max() + 1e-6)).astype(np.float32)
    return found


def some_noise(rng: np.random.Generator, samples: int) -> Floats:
    """Hiss of some colour, sometimes a hum, sometimes clicks."""
    spectrum = np.fft.rfft(rng.normal(size=samples))
    spectrum /= np.maximum(np.fft.rfftfreq(samples, 1 / RATE), 20) ** rng.choice((0.0, 0.5, 1.0))
    noise = np.fft.irfft(spectrum, samples)
    noise /= noise.std()
    if rng.random() < 0.4:
        hum = rng.choice((50, 60, 100, 440, 1000)) * rng.uniform(0.98, 1.02)
        noise += rng.uniform(0.3, 2) * np.sin(2 * np.pi * hum * np.arange(samples) / RATE)
    for at in rng.integers(0, samples - 80, rng.choice((0, 0, 3, 8))):
        noise[at : at + 80] += rng.uniform(3, 12) * np.exp(-np.arange(80) / 15) * rng.choice((-1, 1))
    found: Floats = noise.astype(np.float32)
    return found


def some_clip(rng: np.random.Generator, seconds: int) -> tuple[Floats, Floats]:
    """Sound, and for each 10 ms whether somebody speaks: within a phrase also between its syllables."""
    samples = seconds * RATE
    sound, speech = np.zeros(samples, np.float32), np.zeros(samples, np.float32)
    at = int(rng.uniform(0.1, 1.2) * RATE)
    while at < samples - RATE // 4:
        end = min(at + int(rng.uniform(0.5, 1.8) * RATE), samples)
        begin = at
        while at < end - RATE // 16:
            length = min(int(rng.uniform(0.09, 0.28) * RATE), end - at)
            sound[at : at + length] += rng.uniform(0.4, 1) * some_syllable(rng, length)
            at += length + int(rng.uniform(0, 0.05) * RATE)
        speech[begin:end] = 1
        at = end + int(rng.uniform(0.4, 1.4) * RATE)
    loudness = 10 ** rng.uniform(-1.2, 0)
    sound += some_noise(rng, samples) * 0.25 * 10 ** (-rng.uniform(4, 24) / 20)
    return loudness * 0.4 * sound, (speech.reshape(-1, HOP).mean(axis=1) > 0.5).astype(np.float32)


# ---------------------------------------------------------------------------------------------------------- features


def waves() -> Floats:
    """[WINDOW, 2 * BINS]: cosines, then sines, under a Hann window."""
    angles = 2 * np.pi * np.outer(np.arange(WINDOW), np.arange(1, BINS + 1)) / WINDOW
    found: Floats = (np.hstack([np.cos(angles), np.sin(angles)]) * np.hanning(WINDOW)[:, None]).astype(np.float32)
    return found


def bands() -> Floats:
    """[2 * BINS, BANDS]: triangles that are narrow where the ear is."""
    edges = 700 * (np.exp(np.linspace(np.log1p(80 / 700), np.log1p(3900 / 700), BANDS + 2)) - 1)
    hertz = np.arange(1, BINS + 1) * RATE / WINDOW
    rises = (hertz[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falls = (edges[2:] - hertz[:, None]) / (edges[2:] - edges[1:-1])
    triangles = np.clip(np.minimum(rises, falls), 0, None) + 1e-3
    found: Floats = np.vstack([triangles, triangles]).astype(np.float32)
    return found


def features(sound: Floats) -> Floats:
    """[clips, frames, BANDS] of [clips, samples], before they are scaled."""
    padded = np.pad(sound, ((0, 0), (TAIL, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW, axis=1)[:, ::HOP]
    found: Floats = np.log((windows @ waves()) ** 2 @ bands() + np.float32(1e-3))
    return found


# ----------------------------------------------------------------------------------------------------------- network


def sigmoid(x: Floats) -> Floats:
    found: Floats = 1 / (1 + np.exp(-x))
    return found


class Gru:
    """A GRU with one number out of each step. Gates are in ONNX's order: update, reset, hidden."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.w: Floats = rng.normal(0, BANDS**-0.5, (BANDS, 3 * HIDDEN)).astype(np.float32)
        self.r: Floats = rng.normal(0, HIDDEN**-0.5, (HIDDEN, 3 * HIDDEN)).astype(np.float32)
        self.wb: Floats = np.zeros(3 * HIDDEN, np.float32)
        self.rb: Floats = np.zeros(3 * HIDDEN, np.float32)
        self.out: Floats = rng.normal(0, HIDDEN**-0.5, (HIDDEN, 1)).astype(np.float32)
        self.ob: Floats = np.zeros(1, np.float32)

    @property
    def parameters(self) -> list[Floats]:
        return [self.w, self.r, self.wb, self.rb, self.out, self.ob]

    def forward(self, x: Floats) -> Floats:
        """[clips, frames] of [clips, frames, BANDS], as what goes into a sigmoid."""
        n, frames, _ = x.shape
        self.x, self.steps = x, []
        inputs = x @ self.w + self.wb
        h = np.zeros((n, HIDDEN), np.float32)
        outs = []
        for t in range(frames):
            own = h @ self.r + self.rb
            gates = sigmoid(inputs[:, t, : 2 * HIDDEN] + own[:, : 2 * HIDDEN])
            z, r = gates[:, :HIDDEN], gates[:, HIDDEN:]
            hidden = np.tanh(inputs[:, t, 2 * HIDDEN :] + r * own[:, 2 * HIDDEN :])
            self.steps.append((h, z, r, hidden, own[:, 2 * HIDDEN :]))
            h = (1 - z) * hidden + z * h
            outs.append(h)
        self.hs = np.stack(outs, axis=1)
        found: Floats = (self.hs @ self.out + self.ob)[..., 0]
        return found

    def backward(self, dy: Floats) -> list[Floats]:
        d_out = np.einsum("nth,nt->h", self.hs, dy)[:, None]
        d_hs = dy[..., None] * self.out[:, 0]
        d_r, d_rb = np.zeros_like(self.r), np.zeros_like(self.rb)
        d_inputs = np.zeros((*dy.shape, 3 * HIDDEN), np.float32)
        dh = np.zeros_like(self.hs[:, 0])
        for t in range(dy.shape[1] - 1, -1, -1):
            h, z, r, hidden, own = self.steps[t]
            dh = dh + d_hs[:, t]
            d_hidden = dh * (1 - z) * (1 - hidden**2)
            d_z = dh * (h - hidden) * z * (1 - z)
            d_reset = d_hidden * own * r * (1 - r)
            d_own = np.hstack([d_z, d_reset, d_hidden * r])
            d_inputs[:, t] = np.hstack([d_z, d_reset, d_hidden])
            d_r += h.T @ d_own
            d_rb += d_own.sum(axis=0)
            dh = dh * z + d_own @ self.r.T
        d_w = np.einsum("ntb,ntg->bg", self.x, d_inputs)
        return [d_w, d_r, d_inputs.sum(axis=(0, 1)), d_rb, d_out, dy.sum()[None]]


def train(gru: Gru, x: Floats, speech: Floats, rng: np.random.Generator) -> None:
    """Adam on the cross entropy of each frame; gradients are kept short."""
    moments = [(np.zeros_like(p), np.zeros_like(p)) for p in gru.parameters]
    for step in range(1, STEPS + 1):
        some = rng.choice(len(x), BATCH, replace=False)
        guess = sigmoid(gru.forward(x[some]))
        gradients = gru.backward((guess - speech[some]) / guess.size)
        norm = np.sqrt(sum(float((g**2).sum()) for g in gradients))
        rate = 0.012 * min(1, 2 * (1 - step / STEPS) + 0.02)
        for p, g, (m, v) in zip(gru.parameters, gradients, moments, strict=True):
            g = g / max(norm, 1)
            m += 0.1 * (g - m)
            v += 0.001 * (g**2 - v)
            p -= (rate * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)).astype(np.float32)
        if step % 100 == 0:
            print(f"step {step}: {((guess > 0.5) == speech[some]).mean():.3f} of the frames are right")


# -------------------------------------------------------------------------------------------------------------- file


def write(gru: Gru, mean: Floats, scale: Floats) -> None:
    """AUDIO [N, samples] -> SPEECH [N, frames], with the end of the sound and the hidden numbers as state."""
    constants: dict[str, npt.NDArray[np.generic]] = {
        "waves": np.ascontiguousarray(waves().T[:, None, :]),
        "bands": bands(),
        "little": np.array(1e-3, np.float32),
        "mean": mean,
        "scale": scale,
        "w": gru.w.T[None].copy(),
        "r": gru.r.T[None].copy(),
        "b": np.concatenate([gru.wb, gru.rb])[None],
        "out": gru.out,
        "out_b": gru.ob,
        "zero": np.array([0]),
        "one": np.array([1]),
        "two": np.array([2]),
        "tail": np.array([-TAIL]),
        "end": np.array([2**62]),
    }
    node = helper.make_node
    nodes = [
        node("Concat", ["TAIL", "AUDIO"], ["sound"], axis=1),
        node("Slice", ["sound", "tail", "end", "one"], ["NEXT_TAIL"]),
        node("Unsqueeze", ["sound", "one"], ["channel"]),
        node("Conv", ["channel", "waves"], ["swings"], strides=[HOP]),
        node("Transpose", ["swings"], ["swings_t"], perm=[2, 0, 1]),
        node("Mul", ["swings_t", "swings_t"], ["power"]),
        node("MatMul", ["power", "bands"], ["loudness"]),
        node("Add", ["loudness", "little"], ["positive"]),
        node("Log", ["positive"], ["log"]),
        node("Sub", ["log", "mean"], ["centred"]),
        node("Mul", ["centred", "scale"], ["features"]),
        node("Unsqueeze", ["HIDDEN", "zero"], ["before"]),
        node(
            "GRU",
            ["features", "w", "r", "b", "", "before"],
            ["steps", "after"],
            hidden_size=HIDDEN,
            linear_before_reset=1,
        ),
        node("Squeeze", ["after", "zero"], ["NEXT_HIDDEN"]),
        node("Squeeze", ["steps", "one"], ["hidden"]),
        node("MatMul", ["hidden", "out"], ["answer"]),
        node("Add", ["answer", "out_b"], ["answer_b"]),
        node("Sigmoid", ["answer_b"], ["probability"]),
        node("Squeeze", ["probability", "two"], ["flat"]),
        node("Transpose", ["flat"], ["SPEECH"], perm=[1, 0]),
    ]

    def value(name: str, *shape: int | str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", *shape])

    graph = helper.make_graph(
        nodes,
        "voice_activity",
        [value("AUDIO", "samples"), value("TAIL", TAIL), value("HIDDEN", HIDDEN)],
        [value("SPEECH", "frames"), value("NEXT_TAIL", TAIL), value("NEXT_HIDDEN", HIDDEN)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    (HERE / "1").mkdir(exist_ok=True)
    (HERE / "1" / "model.onnx").write_bytes(model.SerializeToString())


def write_talk(rng: np.random.Generator) -> None:
    """A clip to try it with: its sound, and what is right for each 10 ms."""
    sound, speech = some_clip(rng, 6)
    with wave.open(str(HERE / "talk.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes())
    (HERE / "talk.json").write_text(json.dumps([int(one) for one in speech]) + "\n")


def main() -> None:
    rng = np.random.default_rng(SEED)
    clips = [some_clip(rng, SECONDS) for _ in range(CLIPS + HELD_OUT)]
    speech = np.stack([one for _, one in clips])
    x = features(np.stack([sound for sound, _ in clips]))
    mean = x[:CLIPS].mean(axis=(0, 1))
    scale = 1 / x[:CLIPS].std(axis=(0, 1))
    x = (x - mean) * scale
    gru = Gru(rng)
    train(gru, x[:CLIPS], speech[:CLIPS], rng)
    right = (gru.forward(x[CLIPS:]) > 0) == speech[CLIPS:]
    print(f"{right.mean():.3f} of the frames of {HELD_OUT} other clips are right")
    write(gru, mean, scale)
    write_talk(rng)


if __name__ == "__main__":
    main()
