"""The command line of models that run elsewhere: the options of a cluster, and the parts of `flowserve place`.

Decides the values of these options, how a cluster is opened from them (`open_cluster`), and how a placement is proposed
(`step_figures` measures, `expected` simulates, `proposal` decides). Callers: `cli.wings`, `cli.main`, `cli.place`.
"""
