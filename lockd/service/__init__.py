"""The running service: its start, the daemon, its exporter, reloads, and what outlives a restart."""
