class TritonPythonModel:
    def execute(self, requests):
        return [None for _ in requests]
