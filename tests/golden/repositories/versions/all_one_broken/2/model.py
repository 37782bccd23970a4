class TritonPythonModel:
    def initialize(self, args):
        raise FileNotFoundError("weights.bin")
