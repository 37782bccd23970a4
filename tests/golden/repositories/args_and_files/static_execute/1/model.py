import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def initialize(args):
        global SCALE
        SCALE = 2

    @classmethod
    def execute(cls, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", SCALE * r.inputs()[0].as_numpy())]) for r in requests]
