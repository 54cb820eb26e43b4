"""Other rewards, algorithms and filters on rollouts that a run stored: nothing is sampled, and nothing is trained."""
