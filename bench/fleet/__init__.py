"""What a fleet of lockds costs Prometheus, and how long dashboards take on it; __main__.py says how to run
it.
"""
