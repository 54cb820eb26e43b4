"""Apply other rewards, algorithms and filters to the stored rollouts of a run, without sampling or training."""
