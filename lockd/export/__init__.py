"""The process that answers the network: a snapshot in, HTTP out, with no privileges."""
