"""A loopback stand-in for the public blob storage: 127.0.0.1 only, real TLS, blobfile
unmodified."""
