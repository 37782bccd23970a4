"""A model whose requests wait until a test releases them."""

from __future__ import annotations

import threading
from typing import Any

from flowserve import model
from flowserve.graph.function_model import FunctionModel


class HeldModel:
    """`part` is the model: X to Y, FP32[4], one row. It sets `entered` when it runs, and waits for `go_on`."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()

        @model({"X": "FP32[4]"}, {"Y": "FP32[4]"}, max_batch_size=1)
        def held(x: Any) -> Any:
            self.entered.set()
            self.go_on.wait(30)
            return x

        self.part: FunctionModel = held
