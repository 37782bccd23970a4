"""Tests of flowserve, and in `tests.support` the tools that only they use."""
