"""What a folder of labels tells: how far people agree, and how sure each of the figures is."""
