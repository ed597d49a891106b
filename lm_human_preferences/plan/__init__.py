"""Plan of a command: phases with networks, files and memory, and checks of the plan."""
