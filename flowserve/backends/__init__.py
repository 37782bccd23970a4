"""Model execution: loads models and runs batches on them.

Decides how each kind of model (ONNX file, `model.py`, TensorRT plan, Python function) is loaded, checked against its
configuration, and run for a batch. A backend does not know graphs, queues, clocks or the event loop: the runtime calls
it, and gives it a clock.

| module | contents |
|---|---|
| base | the interface: Backend, LoadedModel, Instance, Work, Results |
| registry | finds backends by name; third-party backends by entry point |
| credit | flow control of a decoupled model's responses |
| onnx/, python/, tensorrt/, functions | one backend each |
| library/ | what backends of libraries have in common |
| more/ | backends of extras, which no other package imports |
| worker/ | the code that runs in a worker process |

Callers: runtime/, authoring/, and cli/ for `build-plan`. Third-party backends use base.py only.
"""
