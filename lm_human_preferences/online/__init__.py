"""Labels that are collected while a policy trains, and the reward model that they retrain."""
