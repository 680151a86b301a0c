"""`dsv4`, also installed as `kubectl-dsv4`."""
