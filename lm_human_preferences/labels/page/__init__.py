"""Page in the browser for the questions of a folder. Imports no torch; asks no other machine."""
