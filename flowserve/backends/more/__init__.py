"""Backends of libraries that are extras: decision trees, OpenVINO, PyTorch, TensorFlow, vLLM.

Decides, for each library, how its models are read, described and run. The core imports none of these modules: the
registry of backends has their names, and imports one for its first model. `continuous` is the template of engines that
form their own batches; the others use `backends/library`. A backend of another package needs no more than these do
(docs/write-a-backend.md).
"""
