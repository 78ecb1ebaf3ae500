"""lockd measures where the threads of a Linux host wait."""

from lockd.process.memory import stub_unused_numpy

__version__ = "0.1.0"

stub_unused_numpy()  # before any module imports numpy
