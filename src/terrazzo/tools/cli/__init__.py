"""The command `tz`."""
