"""One-shot tools: each loads programs, traces for a while, prints a result and ends."""
