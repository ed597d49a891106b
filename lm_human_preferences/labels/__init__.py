"""Labels for reward training: read and checked, simulated, or collected from people in folders."""
