"""A loopback stand-in for the public blob storage: 127.0.0.1, real TLS, blobfile unmodified."""
