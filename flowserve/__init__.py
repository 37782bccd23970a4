"""The public door: re-exports only."""

from flowserve.version import __version__

__all__ = ["__version__"]
