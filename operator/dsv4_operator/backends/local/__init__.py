"""Members as processes of this machine, each in its own namespaces if the user may create them."""
