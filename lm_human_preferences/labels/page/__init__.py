"""Web page on which labellers answer a folder's questions. Imports no torch, asks no other host."""
