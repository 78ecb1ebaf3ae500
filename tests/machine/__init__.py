"""Emulated machines for the tests: userland, kernels, and the words with a program inside."""
