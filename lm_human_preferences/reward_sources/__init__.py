"""Where the reward of a policy comes from: a class for each source, and rewards by their names."""
