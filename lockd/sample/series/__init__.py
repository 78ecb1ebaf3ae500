"""Series: which label sets are exported under their own names, within the limit on lines."""
