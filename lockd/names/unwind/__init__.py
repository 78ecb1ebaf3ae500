"""Unwinding: from the registers and stack bytes of a blocked thread to its functions."""
