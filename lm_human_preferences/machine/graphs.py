"""CUDA graphs: kernels of a function that the host starts all at once."""

from collections.abc import Callable

import torch


class Graph:
    """Capture of `work`, which computes anew with what its tensors hold; RuntimeError if it fails.

    work: has neither arguments nor results, reads nothing back, and is the same if it runs twice.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        # First outside of the graph, where libraries choose kernels and take memory for them.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        # Weights that autocast has cast before would be read where they no longer are, and those
        # that it casts here have no values before the graph has run.
        torch.clear_autocast_cache()
        try:
            # Other threads, as the one that writes checkpoints, may go on.
            with torch.cuda.graph(self.graph, capture_error_mode='thread_local'):
                work()
        finally:
            torch.clear_autocast_cache()

    def replay(self) -> None:
        """Compute."""
        self.graph.replay()
