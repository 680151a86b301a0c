"""Backends, which run members: as local processes or as pods, behind one interface."""
