"""The parts of `flowserve run`: ports, stop signals, progress, and the parent of several workers."""
