"""Run of both trainings: its phases, memory and checks, its ranks, directory and record."""
