"""Unwinding: from the registers and the stack bytes of a captured thread to the functions on its stack."""
