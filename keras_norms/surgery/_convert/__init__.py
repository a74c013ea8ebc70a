"""What only `convert` needs."""
