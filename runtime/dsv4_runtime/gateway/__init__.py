"""HTTP front end of a group: forwards requests, and keeps them while the engine is unavailable (docs/gateway.md)."""
