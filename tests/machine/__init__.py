"""Emulated machines for the tests: userland, kernels, and the exchange with an agent inside."""
