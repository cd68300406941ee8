"""Sheer measured against the plain loop and its peers: `make bench`, or `python -m benchmarks --help`."""
