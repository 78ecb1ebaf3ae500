"""Tables as numpy columns: rows of C structs, and look-ups by hash for thousands of keys at a time."""
