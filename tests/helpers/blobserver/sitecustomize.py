"""Redirection in child processes: this folder on PYTHONPATH, and BLOBTEST_REDIRECT."""

import os

if 'BLOBTEST_REDIRECT' in os.environ:
    import server

    server.install_redirect(os.environ['BLOBTEST_REDIRECT'])
