"""Holds every level against the one above, and says which one is to blame."""
