"""Built-in workflows: how a task becomes rollouts."""
