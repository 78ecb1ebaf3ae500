"""lockd tells where the threads of a Linux host wait."""

__version__ = "0.1.0"
