import zlib

import numpy as np
import triton_python_backend_utils as pb_utils
from nvtabular.workflow import Workflow


class TritonPythonModel:
    def initialize(self, args):
        self.workflow = Workflow.load("/models/nvt/1/workflow")
