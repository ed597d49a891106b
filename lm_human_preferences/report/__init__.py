"""Report of runs as one self-contained HTML file, and the model card of an exported model."""
