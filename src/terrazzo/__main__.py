"""`python -m terrazzo` is the command `tz`."""

from terrazzo.tools.cli.commands import main

main()
