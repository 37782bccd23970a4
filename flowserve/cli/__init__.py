"""The `flowserve` command: argument parsing and printing.

Decides: the commands, their options, the form of output and error messages, exit statuses, and the order of a server's
start and stop.

Does not know: how repositories are read, graphs compiled, requests executed or protocols spoken. Each command has one
module (`run`, `check`, `graph`, `infer`, `bench`, `new`, `build_plan`), imported only when the command runs.

Callers: `flowserve.__main__`; `authoring` for `Graph.serve` and graph targets.
"""
