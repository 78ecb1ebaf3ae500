"""Aggregates: drained entries, summed by process, thread, lock and site."""
