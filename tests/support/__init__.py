"""Test tools that only flowserve's own tests use: fake devices and libraries, recorded schedulers, generated models.

Tools for users' tests are in `flowserve.testing`.
"""
