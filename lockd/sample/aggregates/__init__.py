"""Aggregates: the entries of the maps, summed by process, thread, lock and site."""
