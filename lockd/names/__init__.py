"""Names: which unit, lock, site, kind, holder and reason stand behind ids and addresses."""
