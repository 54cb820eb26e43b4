"""Recompute batches dumped by other trainers, and compare the results with their recorded values."""
