"""Backend `callable`: serves Python functions over numpy arrays, declared by their decorator (graph/functions.py).

Decides where the function of a deployment is found, how it is called with a batch or with each request, and how its
results are checked and taken over. It does not know graphs, queues or processes: functions run in the server's process.

Callers: the registry loads `backend.CallableBackend`; authoring/ calls `backend.offer` for functions that exist only in
this process.
"""
