"""Deployment sources: model repositories on disk, and models sent with a load call.

Decides: the directory layout and version policies (`layout`), what a model folder contains (`read`), which deployments
can be served together (`resolve`), what a change affects (`resolve`, `snapshot`), and private folders for sent models
(`override`).

Does not know: how models are loaded and run, or when the repository is polled (`runtime/loading`); backends, which are
passed in as a function.

Callers: `runtime`, `authoring`, `cli`, test tools.
"""
