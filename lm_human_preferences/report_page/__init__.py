"""Report of runs: one HTML file that needs nothing else. Measures nothing and loads no torch."""
