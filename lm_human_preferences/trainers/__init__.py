"""The trainers of policies and reward models; the subfolder has what the original lacked."""
