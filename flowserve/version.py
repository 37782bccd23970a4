"""The version, in one place; nothing else, so that packaging can read it without importing the program."""

__version__ = "0.1.0"
