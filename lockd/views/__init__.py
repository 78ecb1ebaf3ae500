"""Views: profiles, flame graphs, pprof files and `lockd top`."""
