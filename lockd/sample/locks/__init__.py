"""Locks: names and kinds of user-space locks, sampled releases, who waits for whom, and deadlocks."""
