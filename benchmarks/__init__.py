"""Measurements: each prints its figures and says on what machine they were taken."""
