"""Tools that trace what the user names: stackcount, stacksnoop, hist, latency, signals."""
