"""One-shot tools on the daemon's programs: trace for a while, print, end."""
