"""Backend `onnxruntime`: serves ONNX models on the CPU, and on GPUs through onnxruntime's CUDA and TensorRT providers.

Decides how a session is set up, whether a file and its configuration agree, how a batch becomes runs of a session, and
where outputs are written: in host memory, in shared memory for worker processes, or on the device. It does not know
graphs, queues or processes. onnxruntime is imported by session.py only.

| module | decides |
|---|---|
| installation | whether onnxruntime is installed, and only once |
| backend | factory: sessions and instances of one version |
| session | session settings, threads, execution providers |
| errors | the text of onnxruntime's errors |
| instance | runs with tensors in host memory; outputs in shared memory |
| device | runs with tensors on a GPU, as CUDA graphs too |

Signatures, conversions of tensors and runs of whole batches are those of all libraries (../library/).

Callers: the registry calls `installation.make_backend`.
"""
