class TritonPythonModel:
    def execute(self, requests):
        assert False
