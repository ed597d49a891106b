"""Sources of a policy's reward, a class for each, and the loading of rewards by name."""
