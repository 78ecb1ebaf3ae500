"""The CPU budget: what lockd takes of the machine, and what it leaves out to keep to its limit."""
