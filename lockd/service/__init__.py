"""The daemon as a service: start, main loop, exporter process, reloads, and what outlives a restart."""
