"""A reward that is linear in the frozen initial model's hidden states: its fit, doubt and file."""
