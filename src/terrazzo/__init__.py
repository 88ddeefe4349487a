"""Terrazzo: write an operator once, run it fast on every chip."""
