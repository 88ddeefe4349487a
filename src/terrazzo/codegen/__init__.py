"""Turns loops and fusion groups into code a chip can run."""
