"""One-shot tools: they load programs, trace for a while, print and end."""
