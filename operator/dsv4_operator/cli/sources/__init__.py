"""Sources of deployments: the state directory of this machine, and a cluster."""
