"""The CPU: its description, schedules, kernels, machine code and threads."""
