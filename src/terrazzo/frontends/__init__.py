"""What brings models into graphs: one folder a source."""
