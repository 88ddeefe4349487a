"""`python -m terrazzo` is the command `tz`."""

from terrazzo.cli import main

main()
