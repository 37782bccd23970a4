"""Workers: one instance of a model in its execution place (event loop, thread, GPU stream, worker process).

Decides where a batch of one instance executes, how its inputs are gathered and its outputs split, and how the end of
its process is handled. It does not decide which batch runs. Called by `runtime.engine` and `runtime.loading`.
"""
