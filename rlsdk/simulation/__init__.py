"""Training in virtual time: the real scheduler and order of steps, with models of engines and learner."""
