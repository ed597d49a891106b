"""Report of runs, one HTML file that needs nothing else, and the model card of an export."""
