class TritonPythonModel:
    def execute(self, requests):
        return requests[0].no_such_method()
