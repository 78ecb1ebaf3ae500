"""The kernel's names: its symbols, its locks, and the functions that take them."""
