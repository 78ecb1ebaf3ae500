"""Unwinding: from the registers and the stack bytes of a blocked thread to the functions on its stack."""
