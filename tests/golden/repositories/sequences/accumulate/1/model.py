import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.totals = {}

    def execute(self, requests):
        out = []
        for r in requests:
            x, start, ready, corrid = (
                pb_utils.get_input_tensor_by_name(r, n).as_numpy() for n in ("X", "START", "READY", "CORRID")
            )
            key = corrid.ravel()[0]
            total = x if start.ravel()[0] else self.totals[key] + x
            self.totals[key] = total
            out.append(pb_utils.InferenceResponse([pb_utils.Tensor("TOTAL", total), pb_utils.Tensor("ID", corrid)]))
        return out
