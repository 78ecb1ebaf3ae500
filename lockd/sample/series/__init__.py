"""Series: the label sets that are exported, within the limit on lines of /metrics, and their numbers."""
