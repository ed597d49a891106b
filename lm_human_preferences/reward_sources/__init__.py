"""Sources of a policy's reward, a class each, and rewards by their names."""
