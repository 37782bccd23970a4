"""The messages between the server and its worker processes.

Decides how a batch is written into shared memory and onto a socket, and how the reply is checked and read. It does not
start processes or decide what they run. Called by `runtime.workers` and `runtime.model_calls`.
"""
