class TritonPythonModel
    pass
