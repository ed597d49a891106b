"""The two trainers, and the hooks of their steps: console, alarms, checkpoints."""
