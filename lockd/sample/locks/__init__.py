"""Locks: their names and kinds, who waits for whom at this moment, and deadlocks."""
