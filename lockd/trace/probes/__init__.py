"""Tools on a probe of the user's choice: stackcount, stacksnoop, hist, latency, signals."""
