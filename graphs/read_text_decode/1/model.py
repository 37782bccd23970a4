"""Picture file -> page: a black and white picture of fixed size.

Decided here: the size of the page, what is ink and what is paper. This step does not know about text.
"""

import io

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image, UnidentifiedImageError

SIDE = 640
MARGIN = 4
# A few kilobytes of PNG can unpack to gigabytes; pictures of text need no more than this.
MOST_PIXELS = 40_000_000
# Grey levels between the darkest and the lightest pixel below which a picture counts as empty.
LEAST_CONTRAST = 40


class BadPicture(ValueError):
    """The bytes are not a picture this step can read."""


def open_grey(file: bytes) -> Image.Image:
    """The picture in grey, transparent places white, no larger than the page allows."""
    try:
        picture = Image.open(io.BytesIO(file))
        if picture.width * picture.height > MOST_PIXELS:
            raise BadPicture(f"IMAGE has {picture.width} x {picture.height} pixels, at most {MOST_PIXELS} are read")
        if picture.has_transparency_data:
            colour = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", colour.size, "white"), colour)
        grey = picture.convert("L")
    except UnidentifiedImageError:
        raise BadPicture(f"IMAGE is not a picture file: its {len(file)} bytes begin with {file[:8]!r}") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise error if isinstance(error, BadPicture) else BadPicture(f"IMAGE cannot be decoded: {error}") from None
    room = SIDE - 2 * MARGIN
    if max(grey.size) > room:
        grey.thumbnail((room, room), Image.Resampling.LANCZOS)
    return grey


def threshold(grey: np.ndarray) -> float:
    """Otsu's threshold: the grey level that parts the pixels into two groups lying furthest apart."""
    counts = np.bincount(grey.ravel(), minlength=256).astype(np.float64)
    below = np.cumsum(counts)
    mass = np.cumsum(counts * np.arange(256))
    above = below[-1] - below
    apart = np.zeros(256)
    inside = (below > 0) & (above > 0)
    mean_below = mass[inside] / below[inside]
    mean_above = (mass[-1] - mass[inside]) / above[inside]
    apart[inside] = below[inside] * above[inside] * (mean_below - mean_above) ** 2
    # Between two clean groups every level is equally good: the middle one keeps strokes their true width.
    best = np.flatnonzero(apart >= apart.max() * (1 - 1e-9))
    return float(best.mean())


def page_of(file: bytes) -> np.ndarray:
    """The page of one picture file: [SIDE, SIDE] UINT8, 1 where there is ink. Raises BadPicture."""
    grey = np.asarray(open_grey(file))
    page = np.zeros((SIDE, SIDE), np.uint8)
    if int(grey.max()) - int(grey.min()) < LEAST_CONTRAST:
        return page
    dark = grey <= threshold(grey)
    # Writing covers less than half of a page, whether it is dark on light or light on dark.
    ink = dark if 2 * int(dark.sum()) <= dark.size else ~dark
    page[MARGIN : MARGIN + ink.shape[0], MARGIN : MARGIN + ink.shape[1]] = ink
    return page


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        files = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()
        try:
            pages = np.stack([page_of(file) for file in files.ravel()])
        except BadPicture as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
        return pb_utils.InferenceResponse([pb_utils.Tensor("PAGE", pages)])
