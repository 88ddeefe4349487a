"""Chips that do not exist yet: a description, a runtime library, a model of time."""
