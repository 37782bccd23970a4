"""Instances on other machines: how they are started, and the connection between the server and each of them.

Decides which messages the server and an actor (a process with instances on another machine) exchange, how the two
authenticate each other, how an actor loads models and runs batches, and how the engine of a cluster starts actors and
detects their ends. A batch is a message of worker processes (backends/worker/messages.py) followed by its tensors as
bytes. Does not know the event loop, queues or graphs.

`frames` is the wire format, `link` one end of a connection, `actor` the process with instances, `base` the interface of
a cluster's engine. The engines are processes of this machine (`machine`, for tests and for a first try) and Ray
(`ray_agent`, the only module that imports ray, in a process of its own). `agents` is the server's side of both.

Callers: actors.py starts actors, tcp.py sends batches; `python -m` starts the processes. Read `frames` first, then
`actor`.
"""
