"""Software that runs on the members of a group: agent, engine, health, weights, fabric."""
