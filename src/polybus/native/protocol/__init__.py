"""Requests and answers of the native port, shared by port, client, CLI and documentation."""
