"""Members on several machines without Kubernetes: a host service on each, and a backend that uses them."""
