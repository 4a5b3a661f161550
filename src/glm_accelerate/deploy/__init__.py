"""Files that run a config on a cluster or in containers."""
