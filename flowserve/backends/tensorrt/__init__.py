"""Backend `tensorrt`: serves TensorRT plans, which are models compiled for one kind of GPU.

Decides how a plan is opened and shared by the instances on one GPU, which of its optimisation profiles runs a batch,
and in which order TensorRT is called. It does not know graphs, queues or processes, and imports TensorRT in one
function only (library.py). A plan is built from an ONNX file, so its tensors are compared with the configuration by the
code of the onnx backend (library/signature.py, library/tensors.py).

Callers: the registry loads `backend.TensorRtBackend`; `flowserve build-plan` calls library.py.
"""
