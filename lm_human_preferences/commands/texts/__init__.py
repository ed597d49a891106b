"""Commands whose files hold texts: labels of other tools, and what a reward model is to score."""
