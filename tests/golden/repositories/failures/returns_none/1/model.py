class TritonPythonModel:
    def execute(self, requests):
        print("forgot to return")
