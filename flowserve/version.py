"""The version and the default name in server metadata; nothing else, so that packaging can read it alone."""

__version__ = "0.2.0"
SERVER_NAME = "triton"  # unless --id names another: Triton's clients compare it
