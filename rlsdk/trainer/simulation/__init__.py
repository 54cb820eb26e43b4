"""A training in virtual time: the real producer and order of steps, with models of engines and learner beside them."""
