"""Commands against a cluster, through the user's own `kubectl`."""
