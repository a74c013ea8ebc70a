"""Speed and memory compared with what users have today, as ratios from one run."""
