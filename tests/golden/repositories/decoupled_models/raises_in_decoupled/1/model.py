class TritonPythonModel:
    def execute(self, requests):
        raise ValueError("no prompt")
