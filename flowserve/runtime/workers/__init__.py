"""Workers: one instance of a model in its execution place (event loop, thread, GPU stream, worker process).

Decides where a batch of one instance executes, how its inputs are gathered and its outputs split, and what happens when
its process dies. It does not decide which batch runs. Called by `runtime.engine` and `runtime.loading`.
"""
