"""Running members: local processes now; Pods and KubeRay behind the same interface."""
