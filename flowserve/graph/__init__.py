"""Semantics of graphs: from configurations, or Python code, to the compiled graph and its plan.

Decides: which ensembles are valid (`rules`, `compile`), how nested ensembles are folded into one flat graph
(`compile`), the integers that the request path reads (`plan`, `regions`), shape conversions and transfers along edges
(`types`, `transfers`), how graphs are written in Python (`builder`), and how functions are
declared as models (`function_model`).

Does not know: files (`repository`), execution, scheduling decisions, tensor memory. It imports no clock, event loop,
thread or device. networkx is imported here and in `render` only.

Callers: every package above it; `config` is the only one it builds on besides `values` and `errors`.
"""
