"""The code of a worker process: it holds one instance and runs the batches that the server sends.

Decides how a worker starts (forked from a forkserver that has imported what all workers need), its life cycle, where
the tensors of a batch are in shared memory, and the messages between server and worker. Does not know which backend it
runs, graphs, queues or the event loop. The server's side of the protocol is in runtime/.

Worker processes run in older versions of Python than the server and without its dependencies: numpy is the only package
that this code imports.

Callers: runtime/ starts these processes by entry points ("package.module:function") and shares messages.py with them.
Read `main` first, then `driver`.
"""
