"""Batches that other trainers dumped, computed again by rlsdk and compared with what they recorded."""
