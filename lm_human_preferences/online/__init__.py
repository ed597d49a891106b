"""Collection of labels while a policy trains, and retraining of the reward model on them."""
