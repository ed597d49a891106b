"""Plan of a command: phases with their networks, files and memory, and their checks."""
