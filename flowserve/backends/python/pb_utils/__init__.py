"""The module `triton_python_backend_utils` that a `model.py` imports, and the classes in it.

Decides which names models find, with Triton's spelling and behaviour; docs/python-models.md lists them. Models use the
public names only; a leading underscore marks names for the server. These modules do not know how a model is imported,
run or checked: they import nothing of the python backend outside this package.

Callers: models, and the python backend.
"""
