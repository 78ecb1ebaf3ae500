"""The budget: what lockd costs, and what it leaves out to keep to its limit."""
