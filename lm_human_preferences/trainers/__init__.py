"""Sessions, which are runs that are open, and the trainers of policies, reward models and heads."""
