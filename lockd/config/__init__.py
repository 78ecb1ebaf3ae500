"""The configuration: its keys, how a YAML file is read, and the rules that values must obey."""
