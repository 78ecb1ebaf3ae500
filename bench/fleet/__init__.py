"""The cost of a fleet of lockd daemons for one Prometheus, and the time that its dashboards take.

The docstring of __main__.py says how to run the bench.
"""
