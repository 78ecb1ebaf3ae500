"""The sampler: drains the maps, folds their entries into aggregates, and answers the exporter's requests."""
