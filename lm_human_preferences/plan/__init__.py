"""Plan of a command: its phases, from its settings; what they take, and the checks before them."""
