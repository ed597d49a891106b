"""Labels for reward training: how they are checked, simulated, or collected from people."""
