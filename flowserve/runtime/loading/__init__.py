"""Loading and unloading: from a model's folder to open instances, at the start and while the server runs.

Decides which models are loaded, reloaded and unloaded, in which order, what a failed load changes, and when a new
deployment replaces the old one. Does not know how requests run, protocols, or the contents of a model's files.

Callers: `http`, `grpc`, `cli`, `authoring` and `runtime.embedding`. Read `control` first, then `operations`.
"""
