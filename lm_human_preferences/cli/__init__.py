"""Command line: parses the options that hparams/ declares and starts jobs, which import torch."""
