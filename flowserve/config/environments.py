"""The names by which a model speaks of a Python environment of its own.

Decided here: the parameter, the word for the model's folder in it, and by what such a folder is known. Whether there is
one is repository/environment.py's.
"""

from __future__ import annotations

from typing import Final

ENVIRONMENT: Final = "EXECUTION_ENV_PATH"
MODEL_FOLDER: Final = "$$TRITON_MODEL_DIRECTORY"
# What lies at the top of one, by who made it.
MARKS: Final = ("pyvenv.cfg", "conda-meta")
