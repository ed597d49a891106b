"""Plan of a command: the phases that its settings ask for, their memory, and checks before them."""
