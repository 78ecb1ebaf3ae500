"""The sampler: drains the maps, adds their entries up, and answers scrapes with a snapshot."""
