"""Views: profiles, and their forms as flame graphs and pprof files; `lockd top`."""
