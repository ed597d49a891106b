"""Parts of training that the original program lacked: resuming, heads, samples, console."""
