"""Locks: names and kinds of user-space locks, who waits for whom at one moment, and deadlocks."""
