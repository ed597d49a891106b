"""Web page where labellers answer a folder's questions. No torch, no requests to other hosts."""
