"""Where the reward models of a run are saved."""
