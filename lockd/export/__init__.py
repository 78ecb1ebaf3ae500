"""The exporter: a process without privileges that answers HTTP requests from snapshots."""
