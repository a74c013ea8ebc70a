"""What only `prune` needs."""
