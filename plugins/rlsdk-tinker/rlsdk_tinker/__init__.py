"""A server of Tinker's API on your own hardware: `rlsdk-tinker CONFIG`, then any program that uses the client `tinker`.

The client keeps the training loop; rlsdk's engines sample for it, and rlsdk's learner computes gradients and updates.
"""
