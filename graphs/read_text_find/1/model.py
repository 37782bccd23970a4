"""Page -> marks: the connected pieces of ink, where they lie and what the largest look like.

Decided here: what belongs together and what is only dust. This step does not know which way the page is turned, so it
cannot tell lines or letters: the dot of an i is a mark of its own.
"""

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image

MOST_MARKS = 384
MOST_CROPS = 48
CROP = 32
# A mark with less ink is dust.
LEAST_INK = 3


def runs_of(page: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The horizontal runs of ink, row by row: row, first column, column after the last."""
    edges = np.diff(np.pad(page.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    rows, starts = np.nonzero(edges == 1)
    ends = np.nonzero(edges == -1)[1]
    return rows, starts, ends


def label(rows: list[int], starts: list[int], ends: list[int]) -> list[int]:
    """For each run the first run of its mark. Runs that touch, corners included, belong together."""
    parent = list(range(len(rows)))

    def root(run: int) -> int:
        while parent[run] != run:
            parent[run] = parent[parent[run]]
            run = parent[run]
        return run

    above = 0
    for run in range(len(rows)):
        # Runs are sorted, so those above that end left of this one end left of all that follow in this row.
        while rows[above] < rows[run] - 1 or (rows[above] == rows[run] - 1 and ends[above] < starts[run]):
            above += 1
        other = above
        while rows[other] == rows[run] - 1 and starts[other] <= ends[run]:
            one, two = sorted((root(other), root(run)))
            parent[two] = one
            other += 1
    return [root(run) for run in range(len(rows))]


def boxes_of(page: np.ndarray) -> np.ndarray:
    """The boxes of a page's marks, the most ink first: [marks, 4], x0, y0, x1, y1, ends excluded."""
    rows, starts, ends = runs_of(page)
    labels = np.array(label(rows.tolist(), starts.tolist(), ends.tolist()), np.int64)
    _, mark = np.unique(labels, return_inverse=True)
    count = int(mark.max()) + 1 if mark.size else 0
    boxes = np.tile(np.array([page.shape[1], page.shape[0], 0, 0], np.int32), (count, 1))
    np.minimum.at(boxes[:, 0], mark, starts)
    np.minimum.at(boxes[:, 1], mark, rows)
    np.maximum.at(boxes[:, 2], mark, ends)
    np.maximum.at(boxes[:, 3], mark, rows + 1)
    ink = np.bincount(mark, ends - starts, count)
    order = np.argsort(-ink, kind="stable")
    return boxes[order[ink[order] >= LEAST_INK]]


def crop(page: np.ndarray, box: np.ndarray) -> np.ndarray:
    """What lies in a box, scaled to fill CROP x CROP without bending it, in the middle: UINT8, 255 is ink."""
    x0, y0, x1, y1 = (int(edge) for edge in box)
    scale = CROP / max(x1 - x0, y1 - y0)
    size = (max(1, round((x1 - x0) * scale)), max(1, round((y1 - y0) * scale)))
    picture = Image.fromarray(page[y0:y1, x0:x1] * np.uint8(255)).resize(size, Image.Resampling.BILINEAR)
    square = np.zeros((CROP, CROP), np.uint8)
    left, top = (CROP - size[0]) // 2, (CROP - size[1]) // 2
    square[top : top + size[1], left : left + size[0]] = picture
    return square


def marks_of(page: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """BOXES and MARKS of one page. Raises ValueError where there are more marks than BOXES holds."""
    found = boxes_of(page)
    if len(found) > MOST_MARKS:
        raise ValueError(f"the picture has {len(found)} marks, at most {MOST_MARKS} are read: cut it into parts")
    boxes = np.zeros((MOST_MARKS, 4), np.int32)
    boxes[: len(found)] = found
    marks = np.zeros((MOST_CROPS, CROP, CROP), np.uint8)
    for index, box in enumerate(found[:MOST_CROPS]):
        marks[index] = crop(page, box)
    return boxes, marks


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        pages = pb_utils.get_input_tensor_by_name(request, "PAGE").as_numpy()
        try:
            found = [marks_of(page) for page in pages]
        except ValueError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
        boxes, marks = (np.stack(parts) for parts in zip(*found, strict=True))
        return pb_utils.InferenceResponse([pb_utils.Tensor("BOXES", boxes), pb_utils.Tensor("MARKS", marks)])
