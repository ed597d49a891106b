"""Hardware of this machine and settings of this process for it; knows no networks or runs."""
