"""Operating-system processes: forkservers, child processes, Python environments, output logs.

Decides how a process starts, how its end is detected, and where its output goes. Does not know batches, messages
between server and model, or what the end of a process means for requests.

Callers: `runtime.workers` and `runtime.loading`. Read `children` first, then `forkservers`.
"""
