"""What happens when an operator or a compiled function is called."""
