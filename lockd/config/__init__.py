"""The configuration: its keys, the rules for their values, and the reader of YAML files."""
