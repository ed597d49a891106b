"""Hardware of this machine, and the settings of this process that depend on the hardware."""
