"""Backend `python`: serves models written for Triton, a class `TritonPythonModel` in `model.py`.

Decides how a model's file is imported, when its methods are called, which requests and responses it sees, and how its
outputs are checked and taken over. It does not know graphs, queues or the event loop, nor whether it runs in the server
or in a worker process.

| module | decides |
|---|---|
| backend | factory: completion, loading, the instances of a version |
| source | the code of a model: its files, their import, errors outside `execute` |
| instance | when `execute` is called, how coroutines run, what failures become |
| requests | the requests of a batch and their response senders, as a model sees them |
| device | tensors that stay on a GPU |
| answers | checks of the responses, and ownership of their arrays |
| pb_utils/ | the module that models import |

Callers: the registry loads `backend.PythonBackend`; a worker process calls `backend.instance_here` and
`backend.completed_here`.
"""
