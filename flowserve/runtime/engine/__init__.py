"""The engine: turns a request into one response or a stream of responses.

Decides when the scheduler runs, executes its decisions (run batches, deliver responses, report refusals) and does the
accounting. It does not know protocols, files of models, or how a worker executes a batch. Called by http, grpc and
`runtime.embedding`; entry points: `engine.Engine`, `engine.open_engine`.
"""
