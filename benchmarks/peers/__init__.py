"""Servers made as the documentation of other projects recommends, one file each."""
