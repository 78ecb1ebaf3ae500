"""lockd measures where the threads of a Linux host wait."""

from lockd.process.memory import stub_seldom_used, stub_unused_numpy

__version__ = "0.1.0"

stub_seldom_used()  # before any module imports these modules or numpy
stub_unused_numpy()
