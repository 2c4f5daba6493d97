"""dtorch's claims about time and memory, each measured against its rivals in one run."""
