"""The public Python API for graphs and engines: `Graph`, `Engine`, `onnx_model`, `model_folder`.

Decides: what a graph written in Python can do (check, save, load, draw, serve), how it becomes files, and how an engine
is opened inside a program.

Does not know: how graphs are wired (`graph/builder`), validated (`config`, `graph`), drawn (`render`) or executed
(`runtime`).

Callers: user programs, through the names in `flowserve`. No package of flowserve imports this one except the test
tools.
"""
