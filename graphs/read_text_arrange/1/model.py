"""Page, marks and orientation -> characters in reading order.

Decided here: lines, which marks make one character, and how a character lies in its line. What the characters are, and
how wide a gap makes a space between them, is for the next steps to say.
"""

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image

MOST_GLYPHS = 256
CROP = 32
# A mark smaller than this fraction of the line's tall characters is dust.
DUST = 0.08

Box = tuple[int, int, int, int]


def upright(page: np.ndarray, boxes: np.ndarray, degrees: int) -> tuple[np.ndarray, list[Box]]:
    """Page and boxes turned back, where `degrees` is how far the picture was turned clockwise."""
    height, width = page.shape
    x0, y0, x1, y1 = boxes[boxes[:, 2] > 0].T
    quarters = degrees // 90 % 4
    if quarters == 1:
        x0, y0, x1, y1 = y0, width - x1, y1, width - x0
    elif quarters == 2:
        x0, y0, x1, y1 = width - x1, height - y1, width - x0, height - y0
    elif quarters == 3:
        x0, y0, x1, y1 = height - y1, x0, height - y0, x1
    turned = np.stack([x0, y0, x1, y1], axis=1).tolist()
    return np.rot90(page, quarters), [tuple(box) for box in turned]


def into_lines(boxes: list[Box]) -> list[list[Box]]:
    """The boxes line by line, from top to bottom, each from left to right."""
    heights = np.array([y1 - y0 for _, y0, _, y1 in boxes])
    tall = float(np.percentile(heights, 75)) if boxes else 0.0
    # The middle halves of tall marks of one line overlap; those of two lines do not, whatever reaches up or down.
    cores = sorted(((3 * y0 + y1) / 4, (y0 + 3 * y1) / 4) for _, y0, _, y1 in boxes if y1 - y0 > 0.5 * tall)
    bands: list[list[float]] = []
    for top, bottom in cores:
        if bands and top < bands[-1][1]:
            bands[-1][1] = max(bands[-1][1], bottom)
        else:
            bands.append([top, bottom])
    lines: list[list[Box]] = [[] for _ in bands]
    for box in boxes:
        middle = (box[1] + box[3]) / 2
        nearest = min(range(len(bands)), key=lambda band: max(bands[band][0] - middle, middle - bands[band][1]))
        lines[nearest].append(box)
    return [sorted(line) for line in lines]


def join(line: list[Box]) -> list[Box]:
    """Marks that stand above each other make one character: the dot on the i, both dots of a colon."""
    joined: list[Box] = []
    for box in line:
        if joined:
            x0, y0, x1, y1 = joined[-1]
            shared = min(x1, box[2]) - max(x0, box[0])
            if shared > 0.5 * min(x1 - x0, box[2] - box[0]):
                joined[-1] = (min(x0, box[0]), min(y0, box[1]), max(x1, box[2]), max(y1, box[3]))
                continue
        joined.append(box)
    return joined


def crop(page: np.ndarray, box: Box) -> np.ndarray:
    """What lies in a box, scaled to fill CROP x CROP without bending it, in the middle: UINT8, 255 is ink."""
    x0, y0, x1, y1 = box
    scale = CROP / max(x1 - x0, y1 - y0)
    size = (max(1, round((x1 - x0) * scale)), max(1, round((y1 - y0) * scale)))
    picture = Image.fromarray(page[y0:y1, x0:x1] * np.uint8(255)).resize(size, Image.Resampling.BILINEAR)
    square = np.zeros((CROP, CROP), np.uint8)
    left, top = (CROP - size[0]) // 2, (CROP - size[1]) // 2
    square[top : top + size[1], left : left + size[0]] = picture
    return square


def characters(boxes: list[Box]) -> list[tuple[Box, tuple[float, float, float, float], tuple[float, float]]]:
    """Every character in reading order: its box, its row of PLACES, its row of LAYOUT."""
    found: list[tuple[Box, tuple[float, float, float, float], tuple[float, float]]] = []
    for number, line in enumerate(into_lines(boxes)):
        tall = float(np.percentile([y1 - y0 for _, y0, _, y1 in line], 90))
        line = join([box for box in line if max(box[2] - box[0], box[3] - box[1]) > DUST * tall])
        tall = float(np.percentile([y1 - y0 for _, y0, _, y1 in line], 90))
        foot = float(np.median([y1 for *_, y1 in line]))
        end = line[0][0]
        for box in line:
            x0, y0, x1, y1 = box
            place = ((y1 - y0) / tall, (x1 - x0) / tall, (y1 - foot) / tall, (y0 - foot) / tall)
            found.append((box, place, (number, (x0 - end) / tall)))
            end = max(end, x1)
    return found


def arrange(page: np.ndarray, boxes: np.ndarray, degrees: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """GLYPHS, PLACES and LAYOUT of one page. Raises ValueError where there are more characters than they hold."""
    page, upright_boxes = upright(page, boxes, degrees)
    found = characters(upright_boxes)
    if len(found) > MOST_GLYPHS:
        raise ValueError(f"the picture has {len(found)} characters, at most {MOST_GLYPHS} are read: cut it into parts")
    glyphs = np.zeros((MOST_GLYPHS, CROP, CROP), np.uint8)
    places = np.zeros((MOST_GLYPHS, 4), np.float32)
    layout = np.full((MOST_GLYPHS, 2), -1, np.float32)
    for index, (box, place, position) in enumerate(found):
        glyphs[index], places[index], layout[index] = crop(page, box), place, position
    return glyphs, places, layout


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        pages, boxes, degrees = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("PAGE", "BOXES", "ORIENTATION")
        )
        try:
            found = [arrange(*each) for each in zip(pages, boxes, degrees[:, 0].tolist(), strict=True)]
        except ValueError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
        glyphs, places, layouts = (np.stack(parts) for parts in zip(*found, strict=True))
        counts = (layouts[:, :, 0] >= 0).sum(axis=1, keepdims=True).astype(np.int32)
        outputs = {"GLYPHS": glyphs, "PLACES": places, "COUNT": counts, "LAYOUT": layouts}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])
