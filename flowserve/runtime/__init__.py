"""The imperative shell: trio, threads and processes around the pure scheduler.

Decides when the scheduler runs, where its batches are executed, and how models are loaded and unloaded. It does not
know HTTP or gRPC, which call it. The subpackages import downwards only: embedding; loading; engine; tracing and
admission; workers; model_calls; ipc; processes. `pyproject.toml` has the contract.
"""
