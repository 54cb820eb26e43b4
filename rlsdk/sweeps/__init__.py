"""Many runs as one experiment: a grid of settings, or named algorithms on a suite of tasks, each over several seeds."""
