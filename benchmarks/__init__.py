"""Speed and memory against what a user has today, as ratios from one run."""
