"""What people do with operators and models: check, time, fuzz, and the command line."""
