"""Language models: encodings, networks, weights and sampling. Rewards are defined elsewhere."""
