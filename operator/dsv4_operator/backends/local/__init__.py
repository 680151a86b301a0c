"""Members as processes of this machine, each in namespaces of its own where the user has the right to make them."""
