"""A template for backends that run a file by a library: the parts that all of them have in common.

Decides what a library has to provide (`Library`, 100 to 300 lines for each), and makes a backend of it: completion of
the configuration from the file, every disagreement between the two, assembly and division of batches, ragged and
optional inputs, strings, requests without rows, the share of the cores, and execution in the server or in a worker
process. It imports no library and knows none by name.

| module | decides |
|---|---|
| interface | what a library provides; how its parameters are read |
| backend | completion, loading, and the place of instances |
| instance | how an open file runs batches |
| run | one batch in one call of a library |
| signature | whether file and configuration agree; autocompletion |
| tensors | conversion between the tensors of a batch and those of the file, ragged ones too |

Callers: the backends fil, openvino, pytorch and tensorflow are `LibraryBackend`s; onnx and tensorrt, which have more
kinds of instances, use signature, tensors and run.
"""
