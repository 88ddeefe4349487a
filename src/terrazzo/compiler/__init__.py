"""The way down, level by level, from a graph to something that runs."""
