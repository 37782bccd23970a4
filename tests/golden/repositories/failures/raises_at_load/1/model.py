class TritonPythonModel:
    def initialize(self, args):
        with open("/models/missing/weights.bin") as f:
            f.read()

    def execute(self, requests):
        return []
