"""lockd measures where the threads of a Linux host wait."""

from lockd.process.lazy_numpy import leave_out

__version__ = "0.1.0"

leave_out()  # before any module imports numpy
