"""Language runtimes: what CPython and HotSpot keep in memory about the waits of their threads."""
