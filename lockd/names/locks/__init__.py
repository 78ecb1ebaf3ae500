"""User-space locks: their names, kinds and holders, from the stacks of the threads that wait."""
